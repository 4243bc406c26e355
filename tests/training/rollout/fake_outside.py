"""Fakes of rewards, environments and prompts, without processes or a clock; they count calls as
time.
"""

from array import array
from collections.abc import Container

from fake_engine import SAID

from april_rl.metrics import Metrics, Sum
from april_rl.types import Completion, Observation, Prompt, Reply, Sample, SampleId, Score


def reward(sample_id: SampleId) -> float:
    """Return the reward of a sample, different for each."""
    return sample_id.prompt_id + sample_id.index / 64


def num_turns(sample_id: SampleId, most: int) -> int:
    """Return the number of turns after which a sample's environment ends it."""
    return 1 + (sample_id.prompt_id + sample_id.index) % most


class FakePrompts:
    """Prompts 0, 1, 2 … of one to three tokens; with `turns`, the even ones have an environment."""

    def __init__(self, *, turns: int = 0) -> None:
        self.taken: list[int] = []
        self.turns = turns

    def take(self) -> Prompt:
        prompt_id = len(self.taken)
        self.taken.append(prompt_id)
        token_ids = (prompt_id + 1,) * (1 + prompt_id % 3)
        return Prompt(
            id=prompt_id,
            token_ids=token_ids,
            text="",
            answer="",
            source="fake",
            has_environment=self.turns > 0 and prompt_id % 2 == 0,
        )


class FakeScorer:
    """Scorer and environments whose replies arrive out of order, some calls of `collect` after the
    request.
    """

    def __init__(
        self,
        *,
        delay: int = 0,
        failing: Container[int] = (),
        stuck: Container[int] = (),
        by_group: bool = False,
        turns: int = 0,
        broken: Container[int] = (),
        budget: int = 0,
    ) -> None:
        """`delay`: largest number of calls before a reply; `failing`: prompts whose first sample
        has no value; `stuck`: prompts whose first sample never gets a score; `by_group`: scores
        whole groups only; `turns`: most turns of a sample; `broken`: prompts whose environment
        fails after the first sample's first turn; `budget`: sampled tokens of a sample.
        """
        self._turns, self._broken, self._budget = turns, broken, budget
        self._acting: list[tuple[int, Reply]] = []
        self._num_empty = 0  # consecutive calls of `collect` that returned nothing
        self.acted: list[tuple[SampleId, int]] = []  # a sample, and its length when it asked
        self._by_group = by_group
        # For each prompt, samples that wait for their siblings.
        self._groups: dict[int, list[SampleId]] = {}
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

    def act(self, sample: Sample) -> None:
        assert not sample.is_finished
        assert (sample.id, sample.end) not in self.acted
        self.acted.append((sample.id, sample.end))
        lag = (sample.id.prompt_id * 3 + sample.end) % (self._delay + 1)
        reply = Reply(sample.id, sample.end, self._observation(sample))
        self._acting.append((self._now + lag, reply))

    def _observation(self, sample: Sample) -> Observation:
        if not sample.spans:
            return Observation(array("i", [SAID] * (sample.id.prompt_id % 3)))
        last = sample.spans[-1]
        assert isinstance(last, Completion)
        assert last.finish_reason in ("stop", "length")
        turn = sum(c.finish_reason is not None for c in sample.completions)
        if sample.id.prompt_id in self._broken and sample.index == 0:
            return Observation(array("i"), is_final=True, failure=f"no reply to {sample.id}")
        is_used_up = sample.num_tokens >= self._budget
        if is_used_up or turn >= num_turns(sample.id, self._turns):
            return Observation(array("i"), is_final=True, reward=1.0)
        return Observation(array("i", [SAID] * (1 + turn % 3)), reward=1.0)

    def collect(self, timeout_s: float | None, look: object = None) -> list[Score | Reply]:  # noqa: ARG002
        self._now += 1
        self._num_empty = 0 if self._pending or self._acting else self._num_empty + 1
        assert self._num_empty < 1_000, "the collector waits for a reply that will never come"
        possible = [(due, s) for due, s in self._pending if s.prompt_id not in self._stuck]
        if timeout_s is None:
            assert len(possible) == len(self._pending), "waits for a score that never comes"
            self._now = max([self._now, *(due for due, _ in [*possible, *self._acting])])
        elif timeout_s > 0:
            self.num_waits += 1
            possible_dues = [due for due, _ in [*possible, *self._acting]]
            assert possible_dues or self.num_waits < 100, "the collector loops for ever"
            self._now = max(self._now, min(possible_dues, default=self._now))
        known = [entry for entry in possible if entry[0] <= self._now]
        self._pending = [entry for entry in self._pending if entry not in known]
        self.collected += [sample_id for _, sample_id in known]
        replies = [reply for due, reply in self._acting if due <= self._now]
        self._acting = [entry for entry in self._acting if entry[1] not in replies]
        return [*(self._score(sample_id) for _, sample_id in known), *replies]

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
    """A scorer that counts what it scored; `parts` are values of several functions besides the
    reward.
    """

    parts: tuple[str, ...] = ()

    def metrics(self) -> Metrics:
        return Metrics({"reward/retries": Sum(7)})

    def on_evaluation_end(self) -> None:
        pass

    def collect(self, timeout_s: float | None, look: object = None) -> list[Score | Reply]:  # noqa: ARG002
        return [
            each._replace(parts=tuple((name, each.value + 100) for name in self.parts))
            if isinstance(each, Score)
            else each
            for each in super().collect(timeout_s)
        ]
