"""A recorded step trained again: with the run's settings, and beside them with others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from torch import Tensor

from april_rl.config import TrainConfig
from april_rl.errors import RunError
from april_rl.lab.replay.held_out import held_out
from april_rl.lab.replay.responses import TrainedResponse
from april_rl.lab.replay.rewards import scored_again
from april_rl.lab.replay.trainee import Trainee, trainee
from april_rl.lab.report.run_files import Row
from april_rl.run.checkpointing.checkpointer import LEARNER
from april_rl.run.checkpointing.folder import Saved, list_saved
from april_rl.run.checkpointing.resume import CHECKPOINTS
from april_rl.run.tracking.metrics_file import read_metrics
from april_rl.training.recorded_steps import RecordedStep, read_recorded
from april_rl.types import ScoredGroup

_SHOWN = ("reward/", "loss/", "staleness/", "mismatch/", "critic/")  # stages that an update decides
_NUM_SHOWN, _TEXT = 8, 50  # responses in a table, and characters of each
_COURSE = ("loss/total", "loss/grad_norm", "loss/entropy", "loss/behaviour_kl")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Update:
    """An update: its metrics, by how much each weight moved, and what it did with each response."""

    metrics: Mapping[str, float]
    moved: Mapping[str, Tensor]
    responses: Sequence[TrainedResponse]  # those that pull most at the update first
    # Mean log-probability of a token of held-out responses before and after, by set and kind.
    held_out: Mapping[str, tuple[float, float]]

    @property
    def norm(self) -> float:
        return sqrt(self.times(self))

    def figures(self) -> dict[str, object]:
        """Return every figure by name."""
        total = sum(response.size for response in self.responses)
        responses = [response.figures(total) for response in self.responses]
        found = {"update_norm": self.norm, "held_out": self.held_out, "responses": responses}
        return {**self.metrics, **found}

    def times(self, other: Update) -> float:
        """Return the inner product with another update of the same weights."""
        return sum(float((self.moved[n] * other.moved[n]).sum()) for n in self.moved)

    def cosine(self, other: Update) -> float:
        """Return the cosine of the angle between both changes."""
        return self.times(other) / max(self.norm * other.norm, 1e-30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A step of a run, and the same step trained again; and steps before it, if they were asked."""

    step: int
    rows: Mapping[float | None, Row]  # of the run, by step
    again: Update
    changed: Update | None  # with other settings
    course: Mapping[int, Mapping[str, Mapping[str, float]]]  # of the steps before it: metrics

    @property
    def row(self) -> Row:
        return self.rows.get(float(self.step), {})

    @property
    def comparable_keys(self) -> list[str]:
        """Return the metrics of the run that the update decides."""
        keys = self.again.metrics.keys() & self.row.keys()
        return sorted(key for key in keys if key.startswith(_SHOWN))

    @property
    def largest_error(self) -> tuple[float, str]:
        """Return the largest relative difference between the run and the replay, and its metric."""
        errors = [(self._error(key), key) for key in self.comparable_keys]
        return max(errors, default=(0.0, ""))

    def figures(self) -> dict[str, object]:
        """Return every figure by name."""
        found: dict[str, object] = {"step": self.step, "run": self.row}
        found["course"] = self.course
        found["again"] = self.again.figures()
        if self.changed is not None:
            cosine = self.again.cosine(self.changed)
            found["changed"] = {**self.changed.figures(), "cosine": cosine}
        return found

    def _error(self, key: str) -> float:
        ran, found = self.row[key] or 0.0, self.again.metrics[key]
        return abs(ran - found) / max(abs(ran), abs(found), 1e-12)


def replay(
    run_dir: Path, asked: range, *, config: TrainConfig, changed: TrainConfig | None, say: Say
) -> Replay:
    """Train recorded steps again with the settings of the run and, if given, with `changed`, whose
    weights follow from step to step while the samples stay the same.

    Steps between the last checkpoint before them and the first are trained again, too. Raise
    RunError without such a checkpoint, CheckpointError for a step that was not recorded.
    """
    steps = {number: read_recorded(run_dir, number) for number in asked}
    *earlier, step = asked
    unseen = held_out(run_dir, step, config)

    def course(learner: Trainee, how: str) -> tuple[list[dict[str, float]], Update]:
        metrics = []
        for number in earlier:
            say(f"step {number} {how}")
            metrics.append(learner.train(number, steps[number])[0])
        say(f"step {step} {how}")
        return metrics, _update(learner, step, steps[step], held_out=unseen)

    with TemporaryDirectory(prefix="april_rl_replay_") as folder:
        before = Path(folder) / "before"
        with trainee(config) as learner:
            train_up_to(learner, run_dir, asked[0], say=say)
            learner.save(before)
            metrics, again = course(learner, "again")
        others: list[dict[str, float]] = [{} for _ in metrics]
        other = None
        if changed is not None:
            if changed.reward != config.reward:
                steps = {number: scored_again(steps[number], changed) for number in asked}
            with trainee(changed) as learner:
                learner.load(before)
                others, other = course(learner, "with other settings")
    both = zip(earlier, metrics, others, strict=True)
    found = {number: {"again": mine, "changed": other} for number, mine, other in both}
    rows = {row["step"]: row for row in read_metrics(run_dir / "metrics.jsonl")}
    return Replay(step=step, rows=rows, again=again, changed=other, course=found)


def train_up_to(
    learner: Trainee, run_dir: Path, step: int, *, say: Say, since: int | None = None
) -> None:
    """Give a fresh learner the weights with which a step began, from the checkpoint before it or
    before step `since`. Raise RunError as `weights_before` does, CheckpointError if a step since
    then was not recorded.
    """
    base = weights_before(run_dir, since or step)
    say(f"from {base.path if base else 'the model that the run began with'}")
    if base:
        learner.load(base.path / LEARNER)
    for number in range(base.step + 1 if base else 1, step):
        say(f"step {number} again")
        learner.train(number, read_recorded(run_dir, number))


def weights_before(run_dir: Path, step: int) -> Saved | None:
    """Return the last checkpoint before a step, None if the run began less than a checkpoint before
    it and recorded all steps; raise RunError without either.
    """
    saved = [each for each in list_saved(run_dir / CHECKPOINTS) if each.step < step]
    if not saved and not (run_dir / "recorded" / "step_00001.json").is_file():
        raise RunError(
            f"{run_dir} has no checkpoint before step {step}; a run keeps them as checkpoint.keep "
            "says, and python -m april_rl checkpoint show lists them"
        )
    return max(saved, key=lambda each: each.step, default=None)


def _update(
    learner: Trainee,
    step: int,
    recorded: RecordedStep,
    *,
    held_out: Mapping[str, Sequence[ScoredGroup]],
) -> Update:
    before, unseen = learner.weights(), {k: learner.logprob(each) for k, each in held_out.items()}
    metrics, responses = learner.train(step, recorded)
    rewards = [reward for scored in recorded.groups for reward in scored.rewards]
    metrics["reward/mean"] = fmean(rewards)
    after = learner.weights()
    moved = {name: after[name] - before[name] for name in before}
    both = {name: (value, learner.logprob(held_out[name])) for name, value in unseen.items()}
    return Update(metrics, moved, responses, both)


def replay_table(found: Replay, settings: Sequence[str]) -> str:
    """Return the metrics of the run, of the replay and with other settings, side by side."""
    heads, changed = ["run", "again", " ".join(settings)], found.changed
    num_columns = 3 if changed else 2
    rows: list[tuple[str, Sequence[object]]] = []
    for step, course in found.course.items():
        rows.append((f"step {step}", heads))
        ran = found.rows[float(step)]
        both = (ran, course["again"], course["changed"])
        rows += [(key, [metrics.get(key) for metrics in both]) for key in _COURSE]
    rows.append((f"step {found.step}", heads))
    others = changed.metrics if changed else {}
    for key in found.comparable_keys:
        rows.append((key, (found.row[key], found.again.metrics[key], others.get(key))))
    rows.append(("update, norm", (None, found.again.norm, changed and changed.norm)))
    if changed:
        rows.append(("update, cosine with the run", (None, None, found.again.cosine(changed))))
    for name in sorted(found.again.held_out):
        pairs = [update and update.held_out[name] for update in (found.again, changed)]
        cells = [pair and pair[1] - pair[0] for pair in pairs]
        rows.append((f"{name}: nats a token", (None, *cells)))
    width = max(14, *(len(head) + 2 for head in heads))
    lines = [
        f"{name:<36}{''.join(f'{_cell(each):>{width}}' for each in cells[:num_columns])}"
        for name, cells in rows
    ]
    error, key = found.largest_error
    equal = "to the bit" if not error else f"within {error:.1e} ({key})"
    return "\n".join([*lines, f"step {found.step} again is equal to the run {equal}"])


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value or "-")


def responses_table(update: Update, decode: Callable[[Sequence[int]], str]) -> str:
    """Return the responses that pull most at an update, a line for each: the share of all
    gradients by log-probabilities, and means over the tokens.
    """
    total = sum(response.size for response in update.responses)
    heads = ["share", "reward", "advantage", "age", "ratio", "clipped", "masked", "tokens"]
    lines = ["".join(f"{head:>11}" for head in heads) + "  response"]
    for response in update.responses[:_NUM_SHOWN]:
        each = response.figures(total)
        cells = [each[k] for k in ("share", "reward", "advantages", "ages", "ratios", "clipped")]
        text = " ".join(decode(response.sample.token_ids).split())
        numbers = "".join(f"{cell:>11.3g}" for cell in (*cells, each["masks"]))
        lines.append(f"{numbers}{response.sample.num_tokens:>11}  {text[:_TEXT]}")
    return "\n".join(lines)
