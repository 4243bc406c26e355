"""Fakes of engines, scorer and prompts, without model, process or clock: calls count as time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from april_rl.metrics import Metrics, Sum
from april_rl.rollout.in_process import SerialEngines
from april_rl.rollout.requests import Requests
from april_rl.rollout.ticks import Completions, Tick
from april_rl.types import Completion, Prompt, Request, Sample, SampleId, Score

LengthDistribution = Callable[[SampleId], int]  # a sample's response length without a budget
MAX_TICKS = 5_000  # more than any test needs: ends endless loops


def token(sample_id: SampleId, position: int) -> int:
    """Return the token at `position` of a sample's response, the same for all engines and parts."""
    return 1 + (sample_id.prompt_id * 7919 + sample_id.index * 104729 + position * 31) % 9973


def logprob(sample_id: SampleId, position: int, policy_version: int) -> float:
    """Return the log-probability of that token by `policy_version`."""
    return -(token(sample_id, position) + policy_version / 16) / 1024


def reward(sample_id: SampleId) -> float:
    """Return the reward of a sample, different for each."""
    return sample_id.prompt_id + sample_id.index / 64


class FakePrompts:
    """Prompts 0, 1, 2 … of one to three tokens."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self) -> Prompt:
        prompt_id = len(self.taken)
        self.taken.append(prompt_id)
        token_ids = (prompt_id + 1,) * (1 + prompt_id % 3)
        return Prompt(id=prompt_id, token_ids=token_ids, text="", answer="", source="fake")


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """A `SingleEngine` that ends each sample at the length of `length_of` or at its budget.

    It refuses a request that starts at a wrong position or has a wrong token budget.
    """

    length_of: LengthDistribution
    budget: int  # response tokens of a sample over all its requests
    keeps: bool = False  # the state of what it aborts
    policy_version: int = 0
    requests: list[Request] = field(default_factory=list)  # ever submitted, in order
    generated: int = 0  # tokens ever sampled
    now_s: float = 0.0  # a second for each engine step
    on_step: Callable[[FakeEngine, int], None] = lambda _engine, _slots: None
    running: dict[SampleId, tuple[Request, list[int]]] = field(default_factory=dict)
    contexts: dict[SampleId, int] = field(default_factory=dict)  # version of the cache, if running
    kept: dict[SampleId, tuple[int, int]] = field(default_factory=dict)  # position, version
    prefills: int = 0  # requests that had to be prefilled
    queue: list[Request] = field(default_factory=list)

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        for request in submit:
            self._check(request)
        self.requests += submit
        self.queue += submit
        finished: list[Completion] = []
        steps = slot_steps = 0
        while steps < max_steps:
            while self.queue and len(self.running) < slots:
                self._start(self.queue.pop(0))
            if not self.running:
                break
            self.on_step(self, slots)
            self.now_s += 1.0
            steps, slot_steps = steps + 1, slot_steps + len(self.running)
            finished += self._step()
        return Tick(
            finished=Completions(finished),
            num_running=len(self.running),
            num_queued=len(self.queue),
            engine_steps=steps,
            slot_steps=slot_steps,
            context_token_steps=0,
            generated_tokens=slot_steps,
            prefilled_tokens=0,
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
        return Completions(self._completion(request, tokens) for request, tokens in held)

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
        is_stop = tokens and end >= self.length_of(sample_id)
        return Completion(
            sample_id=sample_id,
            start=start,
            policy_version=self.policy_version,
            context_version=self.contexts.get(sample_id, self.policy_version),
            token_ids=array("i", tokens),
            logprobs=array(
                "d", (logprob(sample_id, p, self.policy_version) for p in range(start, end))
            ),
            finish_reason="stop" if is_stop else "length" if end == self.budget else None,
        )

    def _check(self, request: Request) -> None:
        sample_id, start = request.sample_id, request.start
        assert start + request.max_tokens == self.budget, request
        assert start < min(self.length_of(sample_id), self.budget), request
        assert request.token_ids[len(request.prompt_token_ids) :] == [
            token(sample_id, p) for p in range(start)
        ], request
        assert sample_id not in self.running, request
        assert sample_id not in {queued.sample_id for queued in self.queue}, request


class FakeEngines(SerialEngines):
    """Fake engines; records the most requests that were in flight together."""

    def __init__(
        self,
        length_of: LengthDistribution,
        *,
        num_engines: int,
        budget: int,
        keeps: bool = False,
        computes_on: bool = True,
    ) -> None:
        """`computes_on`: an abort comes behind the ticks under way, as it does with real workers;
        otherwise before them.
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
        """Return the seconds of engines that compute side by side; a look takes a microsecond."""
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
            engine.now_s = last_s  # those that were idle have waited for the others
        rest, stalled = super().abort(timeout_s)
        return [*finished, *rest], stalled

    def _look(self, engine: FakeEngine, slots: int) -> None:
        assert len(engine.running) <= slots
        assert len(engine.running) + len(engine.queue) <= slots + max(1, (slots + 1) // 4)
        self.most_running = max(self.most_running, sum(len(e.running) for e in self.each))


class FakeScorer:
    """A scorer whose scores arrive some calls of `collect` after their submission, out of order."""

    def __init__(
        self,
        *,
        delay: int = 0,
        failing: Container[int] = (),
        stuck: Container[int] = (),
        by_group: bool = False,
    ) -> None:
        """`delay`: calls that a score takes at most; `failing`, `stuck`: prompts whose first sample
        has no value, or never a score; `by_group`: scores whole groups only.
        """
        self._by_group = by_group
        self._groups: dict[int, list[SampleId]] = {}  # by prompt, those that wait for siblings
        self._delay, self._failing, self._stuck = delay, failing, stuck
        self._now = 0
        self._pending: list[tuple[int, SampleId]] = []
        self.submitted: list[SampleId] = []
        self.collected: list[SampleId] = []
        self.num_waits = 0

    def submit(self, sample: Sample, *, group_size: int) -> None:
        assert sample.is_finished
        assert group_size >= 1
        assert sample.id not in self.submitted
        self.submitted.append(sample.id)
        lag = (sample.id.prompt_id * 5 + sample.id.index * 3) % (self._delay + 1)
        group = self._groups.setdefault(sample.prompt.id, [])
        group.append(sample.id)
        if not self._by_group or len(group) == group_size:
            self._pending += [(self._now + lag, sample_id) for sample_id in sorted(group)]
            del self._groups[sample.prompt.id]

    def collect(self, timeout_s: float | None) -> list[Score]:
        self._now += 1
        possible = [(due, s) for due, s in self._pending if s.prompt_id not in self._stuck]
        if timeout_s is None:
            assert len(possible) == len(self._pending), "waits for a score that never comes"
            self._now = max([self._now, *(due for due, _ in possible)])
        elif timeout_s > 0:
            self.num_waits += 1
            assert possible or self.num_waits < 100, "the collector loops for ever"
            self._now = max(self._now, min((due for due, _ in possible), default=self._now))
        known = [entry for entry in possible if entry[0] <= self._now]
        self._pending = [entry for entry in self._pending if entry not in known]
        self.collected += [sample_id for _, sample_id in known]
        return [self._score(sample_id) for _, sample_id in known]

    def _score(self, sample_id: SampleId) -> Score:
        is_lost = sample_id.prompt_id in self._failing and sample_id.index == 0
        return Score(
            sample_id=sample_id,
            value=None if is_lost else reward(sample_id),
            outcome="crash" if is_lost else "scored",
            message=f"no value for {sample_id}" if is_lost else "",
            parts=() if is_lost else (("a", reward(sample_id)), ("b", 0.0)),
        )


class CountingScorer(FakeScorer):
    """Counts what it scored; `parts` of several functions beside the value."""

    parts: tuple[str, ...] = ()

    def metrics(self) -> Metrics:
        return Metrics({"reward/retries": Sum(7)})

    def collect(self, timeout_s: float | None) -> list[Score]:
        scores = super().collect(timeout_s)
        named = [tuple((name, score.value + 100) for name in self.parts) for score in scores]
        return [s._replace(parts=parts) for s, parts in zip(scores, named, strict=True)]
