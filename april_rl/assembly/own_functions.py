"""Try the user's functions of the algorithm before anything is started."""

from __future__ import annotations

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Loss
from april_rl.outside.own_algorithm import (
    OwnFunctionError,
    keywords,
    load_advantages,
    load_group_filter,
)
from april_rl.outside.user_code import import_function


def try_own_functions(config: AlgorithmConfig) -> None:
    """Load what the settings name, and call the loss with two short responses. Raise
    OwnFunctionError when one cannot be used, or an argument belongs to none of them.
    """
    load_advantages(config)
    load_group_filter(config)
    if config.loss not in Loss.__members__:
        # Imports torch, which the controller needs for this.
        from april_rl.learner.own_loss import try_loss

        try_loss(config)
    own = (config.loss, config.advantage, config.group_filter or "")
    taken = [keywords(import_function(each)) for each in own if ":" in each]
    for name in config.args:
        if not any(name in names for names in taken):
            raise OwnFunctionError(f"algorithm.args.{name}: no function of yours takes it")
