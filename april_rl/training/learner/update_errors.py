"""Reasons to refuse an update or to warn about it. Imports no torch: the controller uses it."""

from __future__ import annotations

from april_rl.errors import RunError
from april_rl.metrics import Metrics

# A mean above learner.max_mismatch causes a warning, because the difference between two correct
# sides depends on kernels and precision. Above END_FACTOR times the limit, one side is wrong.
END_FACTOR = 5.0
MEAN = "mismatch/logprob_abs_mean"


class MismatchError(RunError):
    """Engine and learner disagree about log-probabilities under the same weights."""


class NonFiniteError(RunError):
    """A loss or gradient is infinite or NaN; an optimizer step would destroy the weights."""

    def after(self, num_steps: int, *, num_minibatches: int) -> NonFiniteError:
        """Return the error with a note of the optimizer steps that were applied before it
        (`num_steps`); a pass over the batch has `num_minibatches` steps.
        """
        applied = {0: "the weights were not changed", 1: "1 optimizer step was applied"}
        num_passes, number = divmod(num_steps, num_minibatches)
        in_pass = f" in pass {num_passes + 1}" if num_passes else ""
        return NonFiniteError(
            f"minibatch {number + 1} of {num_minibatches}{in_pass} was not finite; "
            f"{applied.get(num_steps, f'{num_steps} optimizer steps were applied')}: {self}"
        )


class MismatchWarning:
    """Warns once when engine and learner drift apart, and again only after they have agreed."""

    def __init__(self, max_mismatch: float) -> None:
        self._max_mismatch, self._is_above = max_mismatch, False

    def of(self, metrics: Metrics) -> str | None:
        """Return the warning that the merged metrics of a step call for, or None."""
        if MEAN not in metrics:
            return None
        mean = metrics.number(MEAN)
        was_above, self._is_above = self._is_above, mean > self._max_mismatch
        if was_above or not self._is_above:
            return None
        return (
            f"warning: engine and learner disagree by {mean:.3g} nats on average about tokens "
            "sampled with the same weights, more than learner.max_mismatch="
            f"{self._max_mismatch:g}; above {END_FACTOR * self._max_mismatch:g} nats "
            f"({END_FACTOR:g} times the limit) the step is skipped and the weights are synced again"
        )
