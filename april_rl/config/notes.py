"""What is said once at the start of a run about settings that are allowed and do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from april_rl.config.choices import LOSS_SETTINGS, Ratio, Sleep
from april_rl.config.schema import TrainConfig


def inert_settings(config: TrainConfig, *, device: str) -> Iterator[str]:
    """Yield a line for each setting that never acts because of another one or the device (cpu or
    cuda), with the remedy where there is one.
    """
    algorithm = config.algorithm
    bounds = LOSS_SETTINGS[algorithm.loss]
    is_one_update = config.trainer.num_minibatches == 1
    if algorithm.ratio is Ratio.proximal and is_one_update and bounds:
        keys = " and ".join(f"algorithm.{key}" for key in bounds)
        yield (
            f"every ratio is 1, so {keys} never act and loss/clip_frac stays 0: "
            "with algorithm.ratio=proximal and trainer.num_minibatches=1 the only optimizer step "
            "of a batch compares the policy with itself. Set trainer.num_minibatches above 1, or "
            "algorithm.ratio=behaviour with algorithm.correction=none, if they shall act"
        )
    if config.engine.sleep is Sleep.always and device == "cpu":
        yield "engine.sleep=always has no effect on CPU, where no engine sleeps; remove it"
