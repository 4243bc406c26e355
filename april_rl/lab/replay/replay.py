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
from april_rl.lab.replay.responses import TrainedResponse
from april_rl.lab.replay.rewards import scored_again
from april_rl.lab.replay.trainee import Trainee, trainee
from april_rl.run.checkpointing.checkpointer import LEARNER
from april_rl.run.checkpointing.folder import list_saved
from april_rl.run.checkpointing.resume import CHECKPOINTS
from april_rl.run.tracking.metrics_file import read_metrics
from april_rl.training.recorded_steps import RecordedStep, read_recorded

_SHOWN = ("reward/", "loss/", "staleness/", "mismatch/", "critic/")  # stages that an update decides
_NUM_SHOWN, _TEXT = 8, 50  # responses in a table, and characters of each
Say = Callable[[str], None]


class ReplayError(RunError):
    """A step cannot be trained again; the message says why."""


@dataclass(frozen=True, slots=True)
class Update:
    """An update: its metrics, by how much each weight moved, and what it did with each response."""

    metrics: Mapping[str, float]
    moved: Mapping[str, Tensor]
    responses: Sequence[TrainedResponse]  # those that pull most at the update first

    @property
    def norm(self) -> float:
        """Return the norm of the change of all weights."""
        return sqrt(self.times(self))

    def figures(self) -> dict[str, object]:
        """Return every figure by name."""
        total = sum(response.size for response in self.responses)
        responses = [response.figures(total) for response in self.responses]
        return {**self.metrics, "update_norm": self.norm, "responses": responses}

    def times(self, other: Update) -> float:
        """Return the inner product with another update of the same weights."""
        return sum(float((self.moved[n] * other.moved[n]).sum()) for n in self.moved)

    def cosine(self, other: Update) -> float:
        """Return the cosine of the angle between both changes."""
        return self.times(other) / max(self.norm * other.norm, 1e-30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A step of a run, and the same step trained again."""

    step: int
    recorded: Mapping[str, float | None]  # the run's row
    again: Update
    changed: Update | None  # with other settings

    @property
    def comparable_keys(self) -> list[str]:
        """Return the metrics of the run that the update decides."""
        keys = self.again.metrics.keys() & self.recorded.keys()
        return sorted(key for key in keys if key.startswith(_SHOWN))

    @property
    def largest_error(self) -> tuple[float, str]:
        """Return the largest relative difference between the run and the replay, and its metric."""
        errors = [(self._error(key), key) for key in self.comparable_keys]
        return max(errors, default=(0.0, ""))

    def figures(self) -> dict[str, object]:
        """Return every figure by name."""
        found: dict[str, object] = {"step": self.step, "run": self.recorded}
        found["again"] = self.again.figures()
        if self.changed is not None:
            cosine = self.again.cosine(self.changed)
            found["changed"] = {**self.changed.figures(), "cosine": cosine}
        return found

    def _error(self, key: str) -> float:
        ran, found = self.recorded[key] or 0.0, self.again.metrics[key]
        return abs(ran - found) / max(abs(ran), abs(found), 1e-12)


def replay(
    run_dir: Path, step: int, *, config: TrainConfig, changed: TrainConfig | None, say: Say
) -> Replay:
    """Train a recorded step again with the settings of the run and, if given, with `changed`.

    Steps between the last checkpoint before it and the step are trained again, too. Raise
    ReplayError without such a checkpoint, CheckpointError for a step that was not recorded.
    """
    if config.teacher.base_url:
        raise ReplayError("a teacher on a server (teacher.base_url) is not asked again")
    saved = [each for each in list_saved(run_dir / CHECKPOINTS) if each.step < step]
    if not saved:
        raise ReplayError(
            f"{run_dir} has no checkpoint before step {step}; a run keeps them as checkpoint.keep "
            "says, and python -m april_rl checkpoint show lists them"
        )
    base = max(saved, key=lambda each: each.step)
    steps = {n: read_recorded(run_dir, n) for n in range(base.step + 1, step + 1)}
    rows = {row["step"]: row for row in read_metrics(run_dir / "metrics.jsonl")}
    say(f"from {base.path}")
    with TemporaryDirectory(prefix="april_rl_replay_") as folder:
        before, other = Path(folder) / "before", None
        with trainee(config) as learner:
            learner.load(base.path / LEARNER)
            for number in range(base.step + 1, step):
                say(f"step {number} again")
                learner.train(number, steps[number])
            learner.save(before)
            say(f"step {step} again")
            again = _update(learner, step, steps[step])
        if changed is not None:
            paid = steps[step]
            if changed.reward != config.reward:
                paid = scored_again(paid, changed)
            with trainee(changed) as learner:
                learner.load(before)
                say(f"step {step} with other settings")
                other = _update(learner, step, paid)
    return Replay(step=step, recorded=rows.get(float(step), {}), again=again, changed=other)


def _update(learner: Trainee, step: int, recorded: RecordedStep) -> Update:
    before = learner.weights()
    metrics, responses = learner.train(step, recorded)
    rewards = [reward for scored in recorded.groups for reward in scored.rewards]
    metrics["reward/mean"] = fmean(rewards)
    after = learner.weights()
    moved = {name: after[name] - before[name] for name in before}
    return Update(metrics, moved, responses)


def replay_table(found: Replay, settings: Sequence[str]) -> str:
    """Return the metrics of the run, of the replay and with other settings, side by side."""
    heads = ["run", "again", *([" ".join(settings)] if found.changed else [])]
    width = max(14, *(len(head) + 2 for head in heads))
    lines = [f"{'':<36}{''.join(f'{head:>{width}}' for head in heads)}"]
    for key in found.comparable_keys:
        values = [found.recorded[key], found.again.metrics[key]]
        values += [found.changed.metrics.get(key)] if found.changed else []
        cells = ("-" if value is None else f"{value:.6g}" for value in values)
        lines.append(f"{key:<36}{''.join(f'{cell:>{width}}' for cell in cells)}")
    norms = [f"{'update, norm':<36}{'':>{width}}{found.again.norm:>{width}.6g}"]
    if found.changed:
        norms[0] += f"{found.changed.norm:>{width}.6g}"
        cosine = found.again.cosine(found.changed)
        norms.append(f"{'update, cosine with the run':<36}{'':>{2 * width}}{cosine:>{width}.4f}")
    error, key = found.largest_error
    equal = "to the bit" if not error else f"within {error:.1e} ({key})"
    return "\n".join([*lines, *norms, f"step {found.step} again is equal to the run {equal}"])


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
