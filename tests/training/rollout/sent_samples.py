"""Groups whose samples a dispatch sends to engines."""

from collections.abc import Sequence
from dataclasses import replace

from fake_engine import FakeEngines
from fake_outside import FakeScorer
from light_samples import PROMPT
from rollout_runs import lognormal

from april_rl.training.rollout.buffer import Buffer
from april_rl.training.rollout.dispatch import Dispatch, ExpectedLength, RequestRules
from april_rl.training.rollout.groups import Groups
from april_rl.training.rollout.open_group import OpenGroup, SampleState
from april_rl.training.rollout.record import StepRecord
from april_rl.types import Completion, SampleId

VERSION = 3  # policy version
RULES = RequestRules(tick_steps=4, max_response_tokens=40, seed=0)


def record(*, num_slots: int, policy_version: int = VERSION) -> StepRecord:
    """Return the record of a step in which nothing happens and no time passes."""
    return StepRecord(num_slots=num_slots, policy_version=policy_version, clock=lambda: 0.0)


class Sent:
    """A dispatch at the beginning of a step, and the groups whose samples it sends."""

    def __init__(self, *, group_size: int, num_engines: int = 2, num_slots: int = 8) -> None:
        self.buffer = Buffer(group_size)
        self.groups = Groups(self.buffer, FakeScorer(), keep=lambda _: True)
        self.engines = FakeEngines(lognormal(9, 0.9), num_engines=num_engines, budget=40)
        self.begin(num_slots=num_slots)

    def begin(self, *, num_slots: int) -> None:
        self.record = record(num_slots=num_slots)
        self.dispatch = Dispatch(self.engines, RULES, ExpectedLength(), self.record)

    def open(self, prompt_id: int, *, engines: Sequence[int | None] = ()) -> OpenGroup:
        """Open a group whose samples were on these engines before."""
        group = self.buffer.open(replace(PROMPT, id=prompt_id))
        group.engines[: len(engines)] = engines
        return group

    def extend(self, *completions: Completion, engine: int | None = None) -> list[Completion]:
        """Extend the groups and record the result as a step does; return the expected completions,
        only those of `engine` if it is given.
        """
        expected = self.groups.extend(completions, policy_version=VERSION, engine=engine)
        for group, completion in expected:
            self.record.take_back(group, completion)
        return [completion for _, completion in expected]

    def in_flight(self) -> list[int]:
        slots = self.dispatch.slots
        return [slots.in_flight(engine) for engine in range(self.engines.num_engines)]

    def assignments(self) -> dict[int, list[SampleId]]:
        """Return the samples that the next tick of each engine submits."""
        return {
            engine: [SampleId(group.prompt.id, index) for group, index in samples]
            for engine, samples in enumerate(self.dispatch._assigned)
            if samples
        }

    def waiting(self) -> list[SampleId]:
        groups = self.buffer.open_groups()
        return [id_ for group in groups for id_ in group.sample_ids(SampleState.waiting)]
