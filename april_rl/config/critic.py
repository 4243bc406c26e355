"""Settings of a critic, which algorithm.advantage=gae uses."""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.config.checks import check_bounds, within


@dataclass(slots=True, kw_only=True)
class CriticConfig:
    """PPO's value model: it is trained in full, in addition to the policy, with the settings of
    `optimizer` except for the learning rate.
    """

    path: str | None = None  # model whose backbone the critic starts from; null: model.path
    lr: float = within("> 0", 1e-5)  # learning rate, in place of optimizer.lr
    warmup_steps: int = within(">= 0", 0)  # first steps, which train only the critic
    policy_lambda: float = within("in [0, 1]", 0.95)  # λ of the policy's advantages
    # λ of the critic's targets: with 1 a target is the reward itself and does not depend on the
    # critic (Yuan et al. 2025, VC-PPO, decoupled GAE)
    value_lambda: float = within("in [0, 1]", 1.0)
    # a value gains nothing from moving further than this in an update
    value_clip: float | None = within("> 0", None)

    def __post_init__(self) -> None:
        check_bounds("critic", self)
