"""Partial rollouts for TRL's `GRPOTrainer` with vLLM colocated: docs/trl.md.

with_partial_rollouts(trainer, over_sampling_factor=1.5)
"""

from april_rl.trl.checks import TrlError
from april_rl.trl.engine import keep_cpu_weights
from april_rl.trl.partial_rollouts import with_partial_rollouts

__all__ = ["TrlError", "with_partial_rollouts"]

keep_cpu_weights()
