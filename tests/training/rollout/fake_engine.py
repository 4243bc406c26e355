"""Fakes of engines without model, process or clock; they count calls as time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from april_rl.training.rollout.in_process import SerialEngines
from april_rl.training.rollout.requests import Request, Requests
from april_rl.training.rollout.ticks import Completions, Tick
from april_rl.types import Completion, Experts, SampleId

LengthDistribution = Callable[[SampleId], int]  # length of a sample's turns without a budget
SAID = 0  # every token of an environment; engines sample other tokens
MAX_TICKS = 5_000  # more than any test needs: ends endless loops


def token(sample_id: SampleId, position: int) -> int:
    """Return the token sampled at `position` after a sample's prompt; all engines sample the same
    one.
    """
    return 1 + (sample_id.prompt_id * 7919 + sample_id.index * 104729 + position * 31) % 9973


def logprob(sample_id: SampleId, position: int, policy_version: int) -> float:
    return -(token(sample_id, position) + policy_version / 16) / 1024


def experts(sample_id: SampleId, tokens: range, policy_version: int) -> Experts:
    """Return the experts that `policy_version` chooses for the tokens at these positions of prompt
    and response. There are two per token: its position and the version.
    """
    chosen = [number for p in tokens for number in (p + sample_id.index, policy_version)]
    return Experts(array("H", chosen), num_layers=1, num_chosen=2)


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """A `SingleEngine` that ends each turn at the length from `length_of` or at the sample's
    budget.

    It refuses a request that starts at a wrong position or has a wrong token budget.
    """

    length_of: LengthDistribution
    budget: int  # response tokens of a sample over all its requests
    keeps: bool = False  # whether it keeps the state of aborted samples
    policy_version: int = 0
    requests: list[Request] = field(default_factory=list)  # all requests ever submitted, in order
    generated: int = 0  # tokens ever sampled
    now_s: float = 0.0  # advances by a second for each engine step
    on_step: Callable[[FakeEngine, int], None] = lambda _engine, _slots: None
    running: dict[SampleId, tuple[Request, list[int]]] = field(default_factory=dict)
    # Policy version of the cache of each running sample.
    contexts: dict[SampleId, int] = field(default_factory=dict)
    kept: dict[SampleId, tuple[int, int]] = field(default_factory=dict)  # position, version
    prefills: int = 0  # requests that had to be prefilled
    queue: list[Request] = field(default_factory=list)
    # Completions of an interrupted tick.
    finished: list[Completion] = field(default_factory=list)

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        for request in submit:
            self._check(request)
        self.requests += submit
        self.queue += submit
        steps = slot_steps = 0
        while steps < max_steps:
            while self.queue and len(self.running) < slots:
                self._start(self.queue.pop(0))
            if not self.running:
                break
            self.on_step(self, slots)
            self.now_s += 1.0
            steps, slot_steps = steps + 1, slot_steps + len(self.running)
            self.finished += self._step()
        finished, self.finished = self.finished, []
        return Tick(
            finished=Completions(finished),
            engine_steps=steps,
            slot_steps=slot_steps,
            generated_tokens=slot_steps,
            elapsed_s=float(steps),
        )

    def _start(self, request: Request) -> None:
        sample_id = request.sample_id
        stopped_at, context = self.kept.pop(sample_id, (None, self.policy_version))
        is_kept = self.keeps and stopped_at == request.start
        self.prefills += not is_kept
        self.contexts[sample_id] = context if is_kept else self.policy_version
        self.running[sample_id] = (request, [])

    def abort(self) -> Completions:
        for sample_id, (request, tokens) in self.running.items():
            if request.start + len(tokens):
                self.kept[sample_id] = (request.start + len(tokens), self.contexts[sample_id])
        held = [*self.running.values(), *((request, []) for request in self.queue)]
        self.running.clear()
        self.queue.clear()
        finished, self.finished = self.finished, []
        return Completions([*finished, *(self._completion(*each) for each in held)])

    def _step(self) -> list[Completion]:
        self.generated += len(self.running)
        for request, tokens in self.running.values():
            tokens.append(token(request.sample_id, request.start + len(tokens)))
        ended = [self._completion(*held) for held in self.running.values()]
        ended = [completion for completion in ended if completion.finish_reason is not None]
        for completion in ended:
            del self.running[completion.sample_id]
        return ended

    def _completion(self, request: Request, tokens: list[int]) -> Completion:
        sample_id, start, end = request.sample_id, request.start, request.start + len(tokens)
        known = range(request.num_routed, len(request.prompt_token_ids) + end - 1)
        is_stop = tokens and end - _turn_start(request) >= self.length_of(sample_id)
        return Completion(
            sample_id=sample_id,
            start=start,
            policy_version=self.policy_version,
            context_version=self.contexts.get(sample_id, self.policy_version),
            token_ids=array("i", tokens),
            logprobs=array(
                "d", (logprob(sample_id, p, self.policy_version) for p in range(start, end))
            ),
            finish_reason="stop"
            if is_stop
            else "length"
            if len(tokens) == request.max_tokens
            else None,
            experts=experts(sample_id, known, self.policy_version) if tokens else None,
        )

    def _check(self, request: Request) -> None:
        sample_id, start = request.sample_id, request.start
        said = request.token_ids[len(request.prompt_token_ids) :]
        assert len(said) == start, request
        assert sum(each != SAID for each in said) + request.max_tokens == self.budget, request
        assert request.max_tokens > 0, request
        assert start - _turn_start(request) < self.length_of(sample_id), request
        assert all(t in (SAID, token(sample_id, p)) for p, t in enumerate(said)), request
        assert sample_id not in self.running, request
        assert sample_id not in {queued.sample_id for queued in self.queue}, request


def _turn_start(request: Request) -> int:
    """Return where the turn begins that a request continues."""
    start = request.start
    for part in reversed(request.parts):
        if SAID in part:
            break
        start -= len(part)
    return start


class FakeEngines(SerialEngines):
    """Fake engines that record the most requests that were in flight together."""

    def __init__(
        self,
        length_of: LengthDistribution,
        *,
        num_engines: int,
        budget: int,
        keeps: bool = False,
        computes_on: bool = True,
    ) -> None:
        """With `computes_on`, an abort comes after the ticks in progress, as with real workers;
        otherwise it comes before them.
        """
        self._computes_on, self._looks = computes_on, 0
        self.each = [
            FakeEngine(length_of=length_of, budget=budget, keeps=keeps) for _ in range(num_engines)
        ]
        for engine in self.each:
            engine.on_step = self._look
        self.most_running = 0
        self.under_way: list[int] = [0] * num_engines
        self.most_under_way = self.num_ticks = 0
        super().__init__(self.each)

    def set_version(self, policy_version: int) -> None:
        for engine in self.each:
            assert not engine.running
            assert not engine.queue
            engine.policy_version = policy_version

    def clock(self) -> float:
        """Return the seconds of engines that compute in parallel; each call adds a microsecond."""
        self._looks += 1
        return max(engine.now_s for engine in self.each) + 1e-6 * self._looks

    @property
    def generated(self) -> int:
        return sum(engine.generated for engine in self.each)

    def launch(self, engine: int, submit: Requests, *, slots: int, max_steps: int) -> None:
        self.under_way[engine] += 1
        self.most_under_way = max(self.most_under_way, *self.under_way)
        super().launch(engine, submit, slots=slots, max_steps=max_steps)

    def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:
        self.num_ticks += 1
        assert self.num_ticks < MAX_TICKS, "the collector loops for ever"
        ended = super().wait(timeout_s, gather_s=gather_s)
        for engine, _ in ended:
            self.under_way[engine] -= 1
        return ended

    def abort(self, timeout_s: float) -> tuple[list[Completion], list[int]]:
        finished: list[Completion] = []
        while self._computes_on and any(self.under_way):
            finished += [c for _, tick in FakeEngines.wait(self, timeout_s) for c in tick.finished]
        self.under_way = [0] * self.num_engines
        last_s = max(engine.now_s for engine in self.each)
        for engine in self.each:
            engine.now_s = last_s  # idle engines have waited for the others
        rest, stalled = super().abort(timeout_s)
        return [*finished, *rest], stalled

    def _look(self, engine: FakeEngine, slots: int) -> None:
        assert len(engine.running) <= slots
        assert len(engine.running) + len(engine.queue) <= slots + max(1, (slots + 1) // 4)
        self.most_running = max(self.most_running, sum(len(e.running) for e in self.each))
