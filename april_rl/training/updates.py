"""The update of each step, and what a run does when a step goes bad."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from april_rl.config import TrainConfig
from april_rl.config.user_code import OwnFunctionError
from april_rl.errors import RunError
from april_rl.metrics import Metrics
from april_rl.run.tracking.samples_file import SampleRecord, write_samples
from april_rl.training.batch.packing import Batch
from april_rl.training.learner.update_errors import (
    MEAN,
    MismatchError,
    MismatchWarning,
    NonFiniteError,
)

if TYPE_CHECKING:
    from april_rl.training.runtime.workers import Workers

BAD_STEP = "loss/bad_step"
_MAX_BAD_STEPS = 3  # consecutive steps that are not finite; the last one ends the run


class Updates:
    """The updates of a run; a bad step is skipped.

    From the first minibatch whose loss or gradient is not finite, the rest of the step is skipped;
    the changes of earlier minibatches stay. Its groups are written to a file and count as trained,
    so that they are not trained again. A step in which engine and learner disagree about tokens is
    skipped whole, because the next weight sync may fix the disagreement. When too many steps are
    bad, or the user's loss has failed, the run ends, but only after the skipped step: then its
    state is whole and can be saved.
    """

    def __init__(
        self,
        workers: Workers,
        config: TrainConfig,
        run_dir: Path,
        *,
        tell: Callable[[str], None],
    ) -> None:
        """Write the groups of skipped steps to `run_dir`/bad_steps; `tell` gets a line for each."""
        self._workers = workers
        self._folder, self._tell = run_dir / "bad_steps", tell
        self._warning = MismatchWarning(config.learner.max_mismatch)
        self._num_bad = 0  # consecutive non-finite steps
        self._disagreed_in = 0  # step of the last disagreement; 0 after a comparison has agreed
        self._final: RunError | None = None  # the error that ends the run after this step
        first = "compiling the learner and updating"
        self.phase = first if config.learner.fused is True else "update"  # of the next update

    def check(self) -> None:
        """Raise NonFiniteError after _MAX_BAD_STEPS non-finite steps in a row, MismatchError
        when another weight sync did not help, and OwnFunctionError when the user's loss failed.
        """
        if self._final is not None:
            raise self._final

    def save(self) -> dict[str, int]:
        """Return the count of consecutive non-finite steps and the step of a disagreement."""
        return {"num_bad": self._num_bad, "disagreed_in": self._disagreed_in}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue counting from the result of `save`."""
        self._num_bad = state["num_bad"]
        self._disagreed_in = state["disagreed_in"]

    def make(
        self, batch: Batch, *, step: int, records: Callable[[], Iterable[SampleRecord]]
    ) -> Metrics:
        """Take the optimizer steps of a batch, or skip them; return the update's metrics.

        `records` returns the samples to write if the batch is skipped; call `check` after the step.
        """
        try:
            update = self._workers.update(batch)
        except (NonFiniteError, MismatchError, OwnFunctionError) as error:
            groups = self._write_groups(step, records())
            self._final = self._skip(error, step, groups)
            return Metrics({BAD_STEP: 1.0})
        self._num_bad, self.phase = 0, "update"
        if MEAN in update:
            self._disagreed_in = 0
        warning = self._warning.of(update)
        if warning is not None:
            self._tell(warning)
        return Metrics({**update, BAD_STEP: 0.0})

    def _skip(self, error: RunError, step: int, groups: str) -> RunError | None:
        """Note a skipped step; return the error that ends the run, or None if it continues."""
        if isinstance(error, OwnFunctionError):
            return OwnFunctionError(f"{error}. {groups}")
        if isinstance(error, MismatchError):
            disagreed_in, self._disagreed_in = self._disagreed_in, step
            if disagreed_in:
                return MismatchError(
                    f"{error}. {groups}. The weights were synced again after step {disagreed_in}, "
                    "which did not help"
                )
            remedy = ". The weights are synced again; the run ends if that does not help"
            self._tell(f"step {step} is skipped: {error}. {groups}{remedy}")
            return None
        self._num_bad += 1
        if self._num_bad >= _MAX_BAD_STEPS:
            return NonFiniteError(
                f"{error}. {groups}. {self._num_bad} steps in a row were skipped, which is the "
                "limit: lower optimizer.lr or optimizer.max_grad_norm"
            )
        self._tell(f"step {step} is skipped: {error}. {groups}")
        return None

    def _write_groups(self, step: int, records: Iterable[SampleRecord]) -> str:
        """Write the groups of a skipped step; return a sentence that says where, or why not."""
        try:
            return f"Its groups are in {write_samples(self._folder, step, records)}"
        except OSError as error:
            return f"Its groups could not be written: {error}"
