"""An engine that computes nothing but the time: continuous batching on a virtual clock.

It has the counts of a real engine and turns them into seconds by a `Cost`. Between two
events (a response ends, a prefill is under way, a tick is over) any number of engine steps is
one closed form, so a response of 16,384 tokens costs as little as one of ten.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from april_rl.lab.simulator.engine_cost import Cost, EngineWork
from april_rl.lab.simulator.length_distributions import LengthDistribution
from april_rl.lab.simulator.turns import Episodes
from april_rl.training.rollout.requests import Request
from april_rl.training.rollout.ticks import Completions, Tick, TickCounts
from april_rl.types import Completion, FinishReason, SampleId

BLOCK_TOKENS = 16  # block size of vLLM's prefix cache: siblings share whole blocks of their prompt


@dataclass(slots=True, kw_only=True)
class _Running:
    """A request in a slot; during its prefill, `before` is the engine's present step."""

    request: Request
    order: int  # order of admission
    end: int  # response tokens at which it finishes
    reason: FinishReason
    context_version: int
    prefill_left: int  # tokens
    before: int = 0  # how many engine steps had ended when its first token was sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The state of an aborted sample."""

    start: int  # number of response tokens at which it ends
    context_version: int
    num_tokens: int  # prompt and response


class SimulatedEngine:
    """A `SingleEngine` whose samples end at the length that the distribution gives (with
    `episodes`, at the end of their turn), or at their budget.
    """

    def __init__(
        self,
        *,
        length_of: LengthDistribution,
        cost: Cost,
        keeps_parked: bool,
        max_batched_tokens: int,
        block_tokens: int = BLOCK_TOKENS,
        episodes: Episodes | None = None,
    ) -> None:
        """With `keeps_parked`, aborted samples keep their KV cache; `max_batched_tokens` limits
        one engine step, in which each sample after its prefill takes one token.
        """
        # The response tokens at which a request would end without a budget.
        self._natural_end: Callable[[Request], int] = (
            episodes.turn_end if episodes else lambda request: length_of(request.sample_id)
        )
        self._cost, self._block_tokens = cost, block_tokens
        self._keeps_parked, self._max_batched_tokens = keeps_parked, max_batched_tokens
        self._policy_version = 0
        self._queue: deque[Request] = deque()
        self._running: dict[SampleId, _Running] = {}  # requests in the order of admission
        self._prefills: deque[_Running] = deque()
        self._ends: list[tuple[int, int, SampleId]] = []  # heap of (step, order, sample)
        self._kept: dict[SampleId, _Kept] = {}
        self._kept_tokens = 0
        self._asked: set[SampleId] = set()  # samples requested since the last abort
        self._prefixes: set[int] = set()  # prompts that the prefix cache holds
        # Tokens of ended turns that the cache holds, including prompts.
        self._turns: dict[SampleId, int] = {}
        self._step = 0
        self._order = 0
        self._context_tokens = 0  # tokens of the requests that are sampling
        self.peak_kv_tokens = 0  # most tokens ever held, running and kept

    def set_version(self, policy_version: int) -> None:
        """Sample as `policy_version` from now on; call this only while the engine is empty."""
        assert not self._running
        assert not self._queue
        self._policy_version = policy_version
        self._prefixes.clear()
        self._turns.clear()

    def advance(self, submit: Sequence[Request], *, slots: int, max_steps: int) -> Tick:
        """Queue `submit`, and run at most `max_steps` engine steps with at most `slots` requests at
        a time.
        """
        self._queue.extend(submit)
        self._asked.update(request.sample_id for request in submit)
        counts = TickCounts()
        finished: list[Completion] = []
        while counts.engine_steps < max_steps:
            self._fill(slots)
            if not self._running:
                break
            if self._prefills:
                self._prefill_step(counts)
            else:
                ends_in = self._ends[0][0] - self._step
                self._decode_steps(min(ends_in, max_steps - counts.engine_steps), counts)
            held = self._context_tokens + self._kept_tokens
            self.peak_kv_tokens = max(self.peak_kv_tokens, held)
            finished += self._finish()
        work = counts.engine_steps, counts.slot_steps, counts.context_token_steps
        elapsed_s = self._cost.seconds(EngineWork(*work, counts.prefilled_tokens))
        return Tick(finished=Completions(finished), elapsed_s=elapsed_s, **asdict(counts))

    def abort(self) -> Completions:
        """Return a completion for every request that was not returned yet, and empty the engine."""
        # If nothing was requested since the last abort, nothing shows which samples continue.
        if self._asked:
            for sample_id in self._kept.keys() - self._asked:
                self._kept_tokens -= self._kept.pop(sample_id).num_tokens
        self._asked.clear()
        running = [self._completion(held.request, held) for held in self._running.values()]
        queued = [self._completion(request) for request in self._queue]
        if self._keeps_parked:
            for held, completion in zip(self._running.values(), running, strict=True):
                self._keep(held, len(completion.token_ids))
        self._running.clear()
        self._prefills.clear()
        self._ends.clear()
        self._queue.clear()
        self._context_tokens = 0
        return Completions(running + queued)

    def _fill(self, slots: int) -> None:
        """Move queued requests into free slots, in order."""
        while self._queue and len(self._running) < slots:
            request = self._queue.popleft()
            kept = self._kept.pop(request.sample_id, None)
            if kept is not None:
                self._kept_tokens -= kept.num_tokens
            self._admit(request, kept if kept and kept.start == request.start else None)

    def _admit(self, request: Request, kept: _Kept | None) -> None:
        natural, budget = self._natural_end(request), request.start + request.max_tokens
        running = _Running(
            request=request,
            order=self._order,
            end=min(max(natural, request.start + 1), budget),
            reason="stop" if natural <= budget else "length",
            context_version=kept.context_version if kept else self._policy_version,
            prefill_left=0 if kept else self._prefill_tokens(request),
        )
        self._order += 1
        self._running[request.sample_id] = running
        if kept:
            self._begin_decoding(running)
        else:
            self._prefills.append(running)

    def _prefill_tokens(self, request: Request) -> int:
        """Return the number of tokens to compute: those that neither the sample's last turn nor
        a sibling left in the prefix cache.
        """
        prompt_id, num_tokens = request.sample_id.prompt_id, request.num_tokens
        if prompt_id not in self._prefixes:
            self._prefixes.add(prompt_id)
            return num_tokens
        cached = self._turns.get(request.sample_id, num_tokens - request.start)
        return num_tokens - (cached - 1) // self._block_tokens * self._block_tokens

    def _begin_decoding(self, running: _Running) -> None:
        """Sample one token per step from the next step on."""
        running.before = self._step
        self._context_tokens += running.request.num_tokens
        end = self._step + running.end - running.request.start
        heapq.heappush(self._ends, (end, running.order, running.request.sample_id))

    def _decode_steps(self, num_steps: int, counts: TickCounts) -> None:
        """Give every running sample a token in each of `num_steps` steps; only the last step may
        end a sample.
        """
        running = len(self._running)
        counts.engine_steps += num_steps
        counts.slot_steps += num_steps * running
        counts.generated_tokens += num_steps * running
        counts.context_token_steps += (
            num_steps * self._context_tokens + running * num_steps * (num_steps - 1) // 2
        )
        self._context_tokens += num_steps * running
        self._step += num_steps

    def _prefill_step(self, counts: TickCounts) -> None:
        """Run one step in which decoding samples come first and prefills share the remaining
        tokens; as in vLLM, samples that get no tokens are not part of the step.
        """
        counts.engine_steps += 1
        counts.slot_steps += len(self._ends)
        counts.context_token_steps += self._context_tokens
        budget = max(1, self._max_batched_tokens - len(self._ends))
        while self._prefills and budget:
            head = self._prefills[0]
            part = min(budget, head.prefill_left)
            head.prefill_left -= part
            budget -= part
            counts.prefilled_tokens += part
            counts.slot_steps += 1
            counts.context_token_steps += head.request.num_tokens
            if not head.prefill_left:
                self._prefills.popleft()
                self._begin_decoding(head)  # the step that ends a prefill also samples a token
        sampled = len(self._ends)
        counts.generated_tokens += sampled
        self._context_tokens += sampled
        self._step += 1

    def _finish(self) -> list[Completion]:
        """Return the completions of the samples that end with the current step."""
        finished: list[Completion] = []
        while self._ends and self._ends[0][0] == self._step:
            _, _, sample_id = heapq.heappop(self._ends)
            running = self._running.pop(sample_id)
            self._context_tokens -= running.request.num_tokens
            self._context_tokens -= running.end - running.request.start
            # The keys of the cache include the version.
            if running.context_version == self._policy_version:
                self._turns[sample_id] = len(running.request.prompt_token_ids) + running.end
            completion = self._completion(running.request, running, reason=running.reason)
            finished.append(completion)
        return finished

    def _completion(
        self, request: Request, held: _Running | None = None, *, reason: FinishReason | None = None
    ) -> Completion:
        """Return the completion of a request; `held` is None if it never had a slot."""
        num_tokens = 0 if held is None or held.prefill_left else self._step - held.before
        return Completion(
            sample_id=request.sample_id,
            start=request.start,
            policy_version=self._policy_version,
            context_version=held.context_version if held else self._policy_version,
            token_ids=array("i", bytes(4 * num_tokens)),
            logprobs=array("d", bytes(8 * num_tokens)),
            finish_reason=reason,
        )

    def _keep(self, running: _Running, num_tokens: int) -> None:
        """Keep the state of a sample whose prefill was complete."""
        if running.prefill_left:
            return
        held = running.request.num_tokens + num_tokens
        self._kept_tokens += held
        self._kept[running.request.sample_id] = _Kept(
            start=running.request.start + num_tokens,
            context_version=running.context_version,
            num_tokens=held,
        )
