"""Active partial rollouts: start more samples than a step needs, stop at N ready groups, park the
rest, resume it first.

    prompts ──open──▶ groups ──assign──▶ engines ──ticks──▶ finished samples ──▶ scorer
                       ▲ ▲                  │                                      │ scores
            next step: │ │ tokens of        │ abort                                ▼
              resume   │ └─ unfinished ◀────┘                     ready │ rejected │ dropped
                       │    samples                                 │
                       └── parked groups                            └──▶ N of them: trained

The method (APRIL, arXiv 2509.18521, section 3; instance-level refill as in CoPRIS): C =
round(α·N·G) sample slots are kept in flight. A step fills them with the unfinished samples of
parked groups, the oldest first, then with new prompts. Finished samples are scored while generation
continues. When N groups are ready (complete, scored, kept by the filter) and none of the others
would be trained beyond the staleness cap, every request is aborted; an unfinished sample keeps its
tokens, behaviour log-probabilities and versions and continues in the next step with the rest of its
budget. The ready groups that must be trained now are trained, and the rest are drawn at random.

`over_sampling_factor=1, refill=False` is the plain synchronous loop. Engines are driven in ticks
bounded by engine steps, so with `deterministic` the schedule is a function of configuration and
seed.

Where to read on: `step` (the loop of one step), `buffer` (every group), `groups` (what becomes of
one), `open_group` (states of its samples), `dispatch` and `slots` (which engine gets what),
`stop_rule`, `batch_draw`, and `record` (what a step leaves for metrics).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from april_rl.errors import EngineStalledError, RunError
from april_rl.metrics import Metrics
from april_rl.training.rollout.batch_draw import draw_batch
from april_rl.training.rollout.buffer import Buffer
from april_rl.training.rollout.codec import FORMAT, Plain, check_state
from april_rl.training.rollout.dispatch import Dispatch, ExpectedLength
from april_rl.training.rollout.garbage_collection import garbage_collection_paused
from april_rl.training.rollout.groups import Groups
from april_rl.training.rollout.leftovers import Leftovers
from april_rl.training.rollout.ports import Engines, Outside, PromptSource
from april_rl.training.rollout.record import StepRecord
from april_rl.training.rollout.step import Step, StepRules
from april_rl.training.rollout.stop_rule import lost_groups_notes
from april_rl.types import Reply, Sample, Score, ScoredGroup

# How many short samples of this version the learner compares with the engine if the batch has none.
_NUM_PROBES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """The result of a step's rollout: at most N ready groups, and its record."""

    groups: tuple[ScoredGroup, ...]
    probes: Sequence[Sample]  # short samples of this step's weights, trained or not
    record: StepRecord
    metrics: Metrics  # `ledger/*` and the sizes of the buffer
    notes: tuple[str, ...]  # messages for the user, such as of a smaller batch


class Collector:
    """Every group of a run that is not trained yet; `collect` is one step's rollout."""

    def __init__(
        self,
        engines: Engines,
        outside: Outside,
        prompts: PromptSource,
        rules: StepRules,
        *,
        over_sampling_factor: float,
        restarts_episodes: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """With `restarts_episodes`, groups with episodes under way begin from their prompt after
        `restore`; `clock` reads seconds.
        """
        self._engines = engines
        self._outside = outside
        self._prompts = prompts
        self._rules = rules
        self._num_slots = round(over_sampling_factor * rules.num_groups * rules.group_size)
        self._restarts_episodes = restarts_episodes
        self._clock = clock
        self._buffer = Buffer(rules.group_size)
        self._groups = Groups(self._buffer, outside, keep=rules.group_filter.keep)
        self._expected_length = ExpectedLength()

    @garbage_collection_paused()
    def collect(
        self,
        policy_version: int,
        *,
        may_open: bool = True,
        on_progress: Callable[[int, float], None] | None = None,
    ) -> Collection:
        """Generate one step's groups with the weights of `policy_version`; call `on_progress` with
        the number of ready groups and the tokens per second so far.

        Returns N ready groups; it returns fewer only when `may_open` is false and nothing is left
        to finish, or when the bound on rejected groups was reached. Every group not returned is
        parked or ready, with all its tokens. Raises RunError when that bound was reached with no
        group ready, EngineStalledError when an engine does not return, and any RunError of engines
        and scorer; after an error, and after KeyboardInterrupt from `on_progress`, only the tokens
        that a stalled engine sampled in this step are lost.
        """
        record = StepRecord(
            policy_version=policy_version, num_slots=self._num_slots, clock=self._clock
        )
        step = Step(
            self._rules,
            record,
            dispatch=Dispatch(self._engines, self._rules.requests, self._expected_length, record),
            buffer=self._buffer,
            groups=self._groups,
            outside=self._outside,
            prompts=self._prompts,
            may_open=may_open,
        )
        abort_timeout_s = self._rules.abort_timeout_s
        try:
            step.generate(on_progress)
        except (RunError, KeyboardInterrupt):
            with suppress(EngineStalledError):  # the cause is known already
                step.abort_and_park(abort_timeout_s)
            raise
        step.abort_and_park(abort_timeout_s)
        return self._end(record)

    def _end(self, record: StepRecord) -> Collection:
        """Take the groups that are trained, and collect the other results of the step."""
        rules, version = self._rules, record.policy_version
        groups = draw_batch(
            self._buffer.ready_groups(),
            self._buffer.open_versions(policy_version=version),
            num_groups=rules.num_groups,
            max_staleness=rules.max_staleness,
            policy_version=version,
            seed=rules.requests.seed,
        )
        record.end(self._buffer.train(groups))
        notes = lost_groups_notes(
            record.groups.lost,
            rules.group_filter,
            num_groups=len(groups),
            num_wanted=rules.num_groups,
            limit=rules.max_rejected_groups,
        )
        return Collection(
            groups=tuple(groups),
            probes=self._buffer.fresh_samples(version, limit=_NUM_PROBES),
            record=record,
            metrics=self._buffer.metrics(),
            notes=tuple(notes),
        )

    def take_back(self, collection: Collection) -> None:
        """Undo the end of `collect`, for groups that could not be trained: the next step has them
        ready and collects the same ones.
        """
        self._buffer.take_back(collection.record.groups)

    def settle_scores(self, look: Callable[[], None] = lambda: None) -> None:
        """Wait between two steps for all scores and replies; what they reject counts later. `look`
        is called at least every second, and may raise.
        """
        while known := self._outside.collect(None, look):
            self._groups.take_scores(each for each in known if isinstance(each, Score))
            self._groups.take_replies(each for each in known if isinstance(each, Reply))
            self._groups.send()

    def leftovers(self, *, under_way: Sequence[ScoredGroup]) -> Leftovers:
        """Return the untrained samples; `under_way` was collected for an update that failed."""
        return Leftovers(
            collected=[scored.group.samples for scored in under_way],
            ready=[scored.group.samples for scored in self._buffer.ready_groups()],
            parked=[group.samples for group in self._buffer.open_groups()],
        )

    def save(self) -> Plain:
        """Return plain data for JSON, between two steps, with which a new collector continues."""
        return {
            "format": FORMAT,
            "num_groups": self._rules.num_groups,
            "group_size": self._rules.group_size,
            "max_staleness": self._rules.max_staleness,
            "dispatch": {"expected_tokens": self._expected_length.tokens},
            **self._buffer.save(),
        }

    def restore(self, state: Plain) -> None:
        """Continue where `state` was saved, before the first step and with prompts restored to
        the same place. Raise RunError for another format, or settings that do not fit.
        """
        rules = self._rules
        check_state(
            state,
            num_groups=rules.num_groups,
            group_size=rules.group_size,
            max_staleness=rules.max_staleness,
            max_response_tokens=rules.requests.max_response_tokens,
        )
        self._expected_length.tokens = state["dispatch"]["expected_tokens"]
        self._buffer.restore(
            state, num_engines=self._engines.num_engines, restarts_episodes=self._restarts_episodes
        )
        self._groups.send_again()
