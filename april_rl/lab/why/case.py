"""The step at which a metric left its band, trained again as it was or with a change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from april_rl.config import TrainConfig
from april_rl.config.store import run_config
from april_rl.config.user_code import OwnFunctionError
from april_rl.errors import RunError
from april_rl.lab.replay.replay import Say, train_up_to, weights_before
from april_rl.lab.replay.responses import TrainedResponse
from april_rl.lab.replay.trainee import Trainee, trainee
from april_rl.lab.report.bands import BAD, Departure
from april_rl.lab.report.run_files import Row, RunFiles
from april_rl.run.checkpointing.folder import Saved, list_saved
from april_rl.run.checkpointing.manifest import CheckpointError
from april_rl.run.checkpointing.resume import CHECKPOINTS
from april_rl.start.planning.checks import check_settings
from april_rl.training.learner.update_errors import END_FACTOR, MEAN, NonFiniteError
from april_rl.training.recorded_steps import RecordedStep, read_recorded
from april_rl.training.rollout.measures.reward_metrics import reward_metrics
from april_rl.types import Prompt, Sample, ScoredGroup

_SAMPLED = ("reward/", "source/", "rollout/")  # stages that the samples of a step decide alone
# Recorded steps that the step is compared with; the last ones before it may have its fault already.
_NUM_PAST, _PAUSE = 6, 2
_NO_END = "learner.max_mismatch=1e9"  # a step with a mismatch is trained again all the same

Keeps = Callable[[ScoredGroup, Sample], bool]
Edit = Callable[[RecordedStep], RecordedStep]


class Change(NamedTuple):
    """One thing that is changed before a step is trained again."""

    name: str  # as in "without the longest responses"
    settings: tuple[str, ...] = ()  # KEY=VALUE
    edit: Edit | None = None


class Tested(NamedTuple):
    """An explanation, and what its test said."""

    kind: str
    name: str
    explains: bool | None  # None: it could not be tested
    found: str


def without(keeps: Keeps) -> Edit:
    """Return an edit that leaves out the responses that `keeps` refuses."""

    def edit(recorded: RecordedStep) -> RecordedStep:
        kept = (_part_of(scored, keeps) for scored in recorded.groups)
        return RecordedStep([scored for scored in kept if scored.rewards], recorded.probes)

    return edit


def with_prompts(keeps: Callable[[Prompt], bool]) -> Edit:
    """Return an edit that leaves out the responses to other prompts."""
    return without(lambda scored, _: keeps(scored.group.prompt))


def _part_of(scored: ScoredGroup, keeps: Keeps) -> ScoredGroup:
    chosen = [keeps(scored, sample) for sample in scored.group.samples]
    group = replace(scored.group, samples=tuple(compress(scored.group.samples, chosen)))
    rewards, parts = compress(scored.rewards, chosen), compress(scored.parts, chosen)
    return replace(scored, group=group, rewards=tuple(rewards), parts=tuple(parts))


class StepCase:
    """The first step of a run at which metrics left their bands."""

    def __init__(
        self, run: RunFiles, symptoms: Sequence[Departure], *, folder: Path, say: Say
    ) -> None:
        """Train the step again, with weights in `folder`. Raise RunError if that is impossible."""
        self.run, self.symptoms, self.step = run, symptoms, symptoms[0].step
        self._folder, self._say = folder, say
        saved = list_saved(run.run_dir / CHECKPOINTS)
        after = [each for each in saved if each.step >= self.step]
        self.settings_of = min(after).path if after else run.run_dir
        self.config = self._with()
        # Unless it is resumed with other settings, the update before the step is trained again too.
        self.base = weights_before(run.run_dir, self.step) or Saved(0, self.settings_of)
        paths = (self.settings_of, self.base.path)
        now, then = ((path / "config.yaml").read_text() for path in paths)
        self._num_before = int(now == then and self.step > 1)
        self.recorded = read_recorded(run.run_dir, self.step)
        with self.learner() as learner:
            self.again, self.responses = self.train(learner)  # of the step as it was

    @property
    def row(self) -> Row:
        return next(row for row in self.run.steps if row["step"] == self.step)

    @property
    def disagrees(self) -> bool:
        """Return whether engine and learner disagree in the step trained again."""
        limit = self.run.number("learner.max_mismatch", 1.0)
        return self.again.get(MEAN, 0.0) > limit or any(e.key == MEAN for e in self.testable)

    @property
    def testable(self) -> list[Departure]:
        """Return the symptoms that the step trained again has, too."""
        here = (each for each in self.symptoms if each.step == self.step and each.key != "loss/lr")
        return [
            each for each in here if each.key in self.again and not each.holds(self.again[each.key])
        ]

    @property
    def is_of_update(self) -> bool:
        """Return whether the update decides one of the symptoms, and not the samples alone."""
        return any(not each.key.startswith(_SAMPLED) for each in self.testable)

    def symptom(self, *keys: str) -> Departure | None:
        return next((each for each in self.symptoms if each.key in keys), None)

    def past(self) -> Iterator[tuple[int, RecordedStep]]:
        """Yield recorded steps some steps before the step, the newest first."""
        newest = self.step - 1 - _PAUSE
        for number in range(newest, max(0, newest - _NUM_PAST), -1):
            try:
                yield number, read_recorded(self.run.run_dir, number)
            except CheckpointError:
                return

    def test(self, kind: str, change: Change) -> Tested:
        """Train the step with a change; it is the reason if the first symptom and half are gone."""
        seen = self.testable
        if not seen:
            return Tested(kind, change.name, None, "nothing else had left its band by then")
        try:
            metrics = self.metrics_with(change)
        except RunError as error:
            return Tested(kind, change.name, None, str(error).partition("\n")[0])
        gone = [each for each in seen if each.holds(metrics.get(each.key))]
        explains = seen[0] in gone and 2 * len(gone) >= len(seen)
        return Tested(kind, change.name, explains, "it is gone" if explains else "it stays")

    def metrics_with(self, change: Change) -> Mapping[str, float]:
        """Return the metrics of the step with a change; none if no response is left."""
        self._say(f"step {self.step} again {change.name}")
        with self.learner(*change.settings) as learner:
            return self.train(learner, edit=change.edit)[0]

    def learner(self, *settings: str) -> AbstractContextManager[Trainee]:
        return trainee(self._with(*settings) if settings else self.config)

    def train(
        self, learner: Trainee, *, edit: Edit | None = None, weights_of: int | None = None
    ) -> tuple[dict[str, float], list[TrainedResponse]]:
        """Return the metrics and the responses of the step, trained from its own weights or from
        those before step `weights_of`.
        """
        self._load(learner, weights_of or self.step)
        recorded = self.recorded if edit is None else edit(self.recorded)
        if not recorded.groups:
            return {}, []
        samples = _of_samples(recorded)
        try:
            metrics, responses = learner.train(self.step, recorded)
        except (NonFiniteError, OwnFunctionError):
            return {**samples, BAD: 1.0}, []
        limit = END_FACTOR * self.run.number("learner.max_mismatch", 1.0)
        return {**metrics, **samples, BAD: float(metrics.get(MEAN, 0.0) > limit)}, responses

    def _load(self, learner: Trainee, step: int) -> None:
        """Load the weights with which a step began; at first the learner must be fresh."""
        folder = self._folder / f"before_{step}"
        if not folder.is_dir():
            since = step - self._num_before
            try:
                train_up_to(learner, self.run.run_dir, step, say=self._say, since=since)
            except RunError:  # too little is recorded for the step before
                train_up_to(learner, self.run.run_dir, step, say=self._say)
            learner.save(folder)
        learner.load(folder)

    def _with(self, *settings: str) -> TrainConfig:
        """Return the settings that the step had, with others."""
        return check_settings(run_config(self.settings_of / "config.yaml", [_NO_END, *settings]))


def _of_samples(recorded: RecordedStep) -> dict[str, float]:
    """Return the metrics that the samples of a step decide alone."""
    samples = [sample for scored in recorded.groups for sample in scored.group.samples]
    prompts = [scored.group.prompt.token_ids for scored in recorded.groups]
    return {
        **reward_metrics(recorded.groups).read(),
        "rollout/response_tokens_mean": fmean(sample.num_tokens for sample in samples),
        "rollout/prompt_tokens_mean": fmean(map(len, prompts)),
        "rollout/truncated_frac": fmean(sample.finish_reason == "length" for sample in samples),
    }
