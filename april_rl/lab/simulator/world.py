"""Engines, prompts and rewards of a simulated run, on a virtual clock."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from april_rl.errors import EngineStalledError
from april_rl.lab.simulator.length_distributions import uniform
from april_rl.lab.simulator.simulated_engine import SimulatedEngine
from april_rl.lab.simulator.turns import Episodes
from april_rl.training.rollout.requests import Requests
from april_rl.training.rollout.ticks import Completions, Tick
from april_rl.types import Completion, Prompt, Reply, Sample, SampleId, Score

_NO_SIGNAL_STREAM = -2  # a separate stream, so that it never meets the one of lengths


class VirtualClock:
    """Seconds since the run began; only events advance it."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def move_to(self, now_s: float) -> None:
        """Advance the clock to `now_s`; it never goes back."""
        self._now_s = max(self._now_s, now_s)


class ParallelEngines:
    """Simulated engines that work at the same time, as `ports.Engines`.

    An abort takes effect after the ticks launched before it, as with workers.
    """

    def __init__(self, engines: Sequence[SimulatedEngine], *, clock: VirtualClock) -> None:
        """Use `engines[i]` as engine i."""
        self._engines, self._clock = engines, clock
        # By engine: when ticks were launched, and what computes them.
        self._launched: list[deque[tuple[float, Callable[[], Tick]]]] = [deque() for _ in engines]
        # By engine: when its tick ends, and the tick.
        self._begun: dict[int, tuple[float, Tick]] = {}
        self._free_s = [0.0] * len(engines)  # when the last started tick ends

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    def launch(self, engine: int, submit: Requests, *, slots: int, max_steps: int) -> None:
        """Queue a tick, which begins now or when the previous one ends."""
        advance = self._engines[engine].advance
        compute = partial(advance, submit.each(), slots=slots, max_steps=max_steps)
        self._launched[engine].append((self._clock(), compute))

    def wait(self, timeout_s: float, *, gather_s: float = 0.0) -> list[tuple[int, Tick]]:
        """Move the clock to the next end of a tick, and return the ticks that end then; with
        `gather_s` also those that end within that time.
        """
        for engine in range(self.num_engines):
            if engine not in self._begun and self._launched[engine]:
                self._begin(engine)
        first_s = min(end_s for end_s, _ in self._begun.values())
        now_s = max(first_s, self._clock() + gather_s)
        if now_s > self._clock() + timeout_s:
            raise EngineStalledError(f"a simulated tick takes longer than {timeout_s:g} s")
        self._clock.move_to(now_s)
        ended = sorted(engine for engine, (end_s, _) in self._begun.items() if end_s <= now_s)
        return [(engine, self._begun.pop(engine)[1]) for engine in ended]

    def abort(self, timeout_s: float) -> tuple[list[Completion], list[int]]:  # noqa: ARG002
        """Return all requests of the engines after the last engine has reached its abort."""
        given_back: list[Completion] = []
        for engine, simulated in enumerate(self._engines):
            given_back += self._end(engine)
            while self._launched[engine]:
                self._begin(engine)
                given_back += self._end(engine)
            given_back += simulated.abort()
        return given_back, []

    def _begin(self, engine: int) -> None:
        """Compute the oldest launched tick."""
        at_s, compute = self._launched[engine].popleft()
        tick = compute()
        end_s = self._free_s[engine] = max(at_s, self._free_s[engine]) + tick.elapsed_s
        self._begun[engine] = (end_s, tick)

    def _end(self, engine: int) -> Completions:
        """Wait for the running tick, and return what it finished."""
        if engine not in self._begun:
            return Completions()
        end_s, tick = self._begun.pop(engine)
        self._clock.move_to(end_s)
        return tick.finished


class NumberedPrompts:
    """Prompts 0, 1, 2 … of equal length."""

    def __init__(self, num_tokens: int, *, has_environment: bool = False) -> None:
        """Give every prompt `num_tokens` tokens."""
        self._token_ids, self._next = (0,) * num_tokens, 0
        self._has_environment = has_environment

    def take(self) -> Prompt:
        """Return the next prompt."""
        prompt_id, self._next = self._next, self._next + 1
        return Prompt(
            id=prompt_id,
            token_ids=self._token_ids,
            text="",
            answer="",
            source="simulation",
            has_environment=self._has_environment,
        )


class DelayedScores:
    """`ports.Outside` whose rewards are known `score_s` after submission, in order of
    submission, and whose tools reply after their time.
    """

    def __init__(
        self,
        *,
        no_signal_frac: float,
        score_s: float,
        seed: int,
        clock: VirtualClock,
        episodes: Episodes | None = None,
    ) -> None:
        """`no_signal_frac` of the prompts get equal rewards for all their samples; `episodes`
        are used for prompts with an environment.
        """
        self._no_signal_frac, self._score_s, self._seed = no_signal_frac, score_s, seed
        self._clock, self._episodes = clock, episodes
        self._pending: deque[tuple[float, SampleId]] = deque()  # (when its score is known, sample)
        self._acting: list[tuple[float, int, Reply]] = []  # heap: (when it is known, order, reply)
        self._num_asked = 0

    def submit(self, sample: Sample, *, group_size: int) -> None:  # noqa: ARG002 (one by one)
        """Queue the sample's reward, known after `score_s`."""
        self._pending.append((self._clock() + self._score_s, sample.id))

    def act(self, sample: Sample) -> None:
        """Let the sample's tool work; its reply is known after its time."""
        assert self._episodes is not None, f"prompt {sample.prompt.id} has no environment"
        observation = self._episodes.observation(sample)
        due_s = self._clock() + self._episodes.seconds(sample, observation)
        reply = Reply(sample.id, sample.end, observation)
        heapq.heappush(self._acting, (due_s, self._num_asked, reply))
        self._num_asked += 1

    def collect(
        self,
        timeout_s: float | None,
        look: Callable[[], None] = lambda: None,  # noqa: ARG002
    ) -> list[Score | Reply]:
        """Return the rewards and replies known by now; with a timeout, wait for the first of them
        or for all.
        """
        if timeout_s != 0 and (self._pending or self._acting):
            dues_s = [due_s for due_s, _ in self._pending] + [due_s for due_s, _, _ in self._acting]
            if timeout_s is None:
                self._clock.move_to(max(dues_s))
            else:
                self._clock.move_to(min(*dues_s, self._clock() + timeout_s))
        known: list[Score | Reply] = []
        while self._pending and self._pending[0][0] <= self._clock():
            known.append(self._score(self._pending.popleft()[1]))
        return known + self._replies()

    def _replies(self) -> list[Reply]:
        """Return the replies known by now, in the order in which they were asked for."""
        known: list[tuple[int, Reply]] = []
        while self._acting and self._acting[0][0] <= self._clock():
            known.append(heapq.heappop(self._acting)[1:])
        return [reply for _, reply in sorted(known)]

    def _score(self, sample_id: SampleId) -> Score:
        """Return 1 for samples with an odd index, 0 for others and for prompts without signal."""
        drawn = uniform(self._seed, sample_id.prompt_id, _NO_SIGNAL_STREAM)
        is_flat = drawn < self._no_signal_frac
        value = 0.0 if is_flat else float(sample_id.index % 2)
        return Score(sample_id=sample_id, value=value, outcome="scored")
