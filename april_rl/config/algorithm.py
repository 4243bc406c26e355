"""Settings of the algorithm, from rewards to the loss, and which of them go together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

from april_rl.config.checks import check_bounds, require, require_function, within
from april_rl.config.choices import (
    LOSS_SETTINGS,
    Advantage,
    Aggregation,
    Correction,
    Kl,
    Loss,
    Ratio,
)

# The loss and the advantage of each algorithm in configs/algorithm that has another name.
PARTS: dict[str, dict[str, str]] = {
    "loss": dict.fromkeys(("grpo", "dapo", "dr_grpo", "ppo"), "ppo_clip") | {"dppo": "dppo_tv"},
    "advantage": dict.fromkeys(("cispo", "dapo", "dppo", "gspo"), "grpo") | {"ppo": "gae"},
}


@dataclass(slots=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become the loss of each token."""

    # grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, gdpo, grpo_by_turn, gae, none, or
    # module:function
    advantage: str = Advantage.grpo.value
    # ppo_clip, gspo, cispo, sapo, dppo_tv, dppo_kl, policy_gradient, or module:function
    loss: str = Loss.ppo_clip.value
    # module:function that returns whether a scored group is trained; null: dynamic_sampling decides
    group_filter: str | None = None
    # keyword arguments of your own loss, advantage and group filter; each gets the ones it names
    args: dict[str, Any] = field(default_factory=dict)
    ratio: Ratio = Ratio.proximal  # denominator of the loss's ratio
    # the ratio is clipped to [1 - clip_low, 1 + clip_high]; gspo needs 3e-4, 4e-4;
    # dppo_tv, dppo_kl: largest divergence for A < 0 (clip_low) and A > 0 (clip_high); 0.15, 0.05
    clip_low: float = within("> 0", 0.2)
    clip_high: float = within("> 0", 0.28)  # see clip_low; 0.28 is DAPO's clip-higher
    # ppo_clip: tokens with A < 0 and a ratio above this get no gradient
    dual_clip: float | None = within("> 1", None)
    aggregation: Aggregation = Aggregation.token_mean
    kl: Kl = Kl.none  # estimator of the KL divergence to the initial, frozen policy
    # weight of the KL term in the loss or, with k1, in the reward; > 0 unless kl=none
    kl_coefficient: float = within(">= 0", 0.0)
    # steps between two replacements of the reference by the current policy (Liu et al. 2025, ProRL,
    # section 3.1.2, do it by hand)
    reference_every: int | None = within(">= 1", None)
    entropy_coefficient: float = within(">= 0", 0.0)  # weight of the entropy bonus; 0: off
    # nats, Skywork-OR1's adaptive entropy control: after a step whose mean entropy is below this,
    # entropy_coefficient grows by 0.005; after any other step it falls by 0.005, but not below 0;
    # after a step above this, the next step has no bonus; null: entropy_coefficient is constant
    entropy_target: float | None = within("> 0", None)
    correction: Correction = Correction.truncate  # importance weights between engine and learner
    # [low, high] of an importance weight; low is 0 unless correction=mask; null: [0, 2], and with
    # mask [0.5, 5]
    weight_bounds: list[float] | None = None
    # [low, high]: a response gets no gradient if the geometric mean of its weights is outside
    geometric_mask: list[float] | None = None
    # a response with A < 0 gets no gradient if the mean of log(engine / learner) over its tokens is
    # above this, in nats: off-policy sequence masking of DeepSeek-V3.2
    opsm_threshold: float | None = within("> 0", None)
    # reject groups whose rewards are all equal and refill their slots; as in DAPO (Yu et al. 2025,
    # eq. 11: between 0 and G right answers, both excluded) it looks at the raw rewards, before the
    # overlong penalty
    dynamic_sampling: bool = False
    # DAPO's overlong filtering: responses that reached rollout.max_response_tokens are not trained;
    # their rewards stay in the advantages of their group
    mask_truncated: bool = False
    # DAPO's soft overlong punishment: the last share of rollout.max_response_tokens, in which a
    # penalty rises; DAPO: 4,096 of 20,480 = 0.2; 0: off
    overlong_buffer_frac: float = within("in [0, 1]", 0.0)
    # the penalty at the end of that buffer; 0.5 is half the span of rewards of 0 and 1, and DAPO
    # takes 1, half the span of rewards of -1 and 1
    overlong_penalty: float = within(">= 0", 0.5)

    def __post_init__(self) -> None:
        check_bounds("algorithm", self)
        self._check_own_functions()
        self._check_nothing_is_ignored()
        self._check_mask()
        require(
            self.clip_low < 1 or (self.loss == Loss.cispo and self.clip_low == 1),
            f"algorithm.clip_low must be < 1 with algorithm.loss={self.loss} (cispo also takes 1, "
            f"which removes the lower bound), got {self.clip_low:g}",
        )
        require(
            self.ratio is Ratio.proximal
            or self.correction is Correction.none
            or self.loss == Loss.policy_gradient,
            f"algorithm.correction must be none with algorithm.ratio=behaviour, got "
            f"{self.correction.name}: the ratio already carries the importance weight",
        )
        require(
            self.loss not in (Loss.dppo_tv, Loss.dppo_kl) or self.ratio is Ratio.behaviour,
            f"algorithm.loss={self.loss} keeps the policy near the one that sampled the token, so "
            "its ratio cannot be algorithm.ratio=proximal: set algorithm.ratio=behaviour "
            "algorithm.correction=none, or take algorithm=dppo, which has both",
        )
        require(
            self.kl is Kl.none or self.kl_coefficient > 0,
            f"algorithm.kl_coefficient must be > 0 with algorithm.kl={self.kl.name}, got "
            f"{self.kl_coefficient:g}",
        )
        require(
            self.overlong_buffer_frac > 0 or self.overlong_penalty == 0.5,
            f"algorithm.overlong_penalty={self.overlong_penalty:g} has no effect with "
            "algorithm.overlong_buffer_frac=0; remove it",
        )
        require(
            self.overlong_buffer_frac == 0 or self.advantage != Advantage.none,
            f"algorithm.overlong_buffer_frac={self.overlong_buffer_frac:g} changes the reward, and "
            "algorithm.advantage=none does not train it; remove it",
        )
        require(
            self.overlong_buffer_frac == 0 or self.advantage != Advantage.gdpo,
            f"algorithm.overlong_buffer_frac={self.overlong_buffer_frac:g} changes the reward, and "
            "algorithm.advantage=gdpo reads the value of each reward function instead: set it to "
            "0, and give reward.functions one with function: length",
        )

    def _check_own_functions(self) -> None:
        own = [self.group_filter] if self.group_filter else []
        for key, value, known in (
            ("advantage", self.advantage, Advantage),
            ("loss", self.loss, Loss),
        ):
            part = PARTS[key].get(value)
            require(
                part is None,
                f"algorithm.{key} takes a part of an algorithm, got {value}: write "
                f"algorithm={value} for all of it, or algorithm.{key}={part}",
            )
            require_function(f"algorithm.{key}", value, known=list(known.__members__))
            own += [] if value in known.__members__ else [value]
        if self.group_filter:
            form = "null or module:function"
            require_function("algorithm.group_filter", self.group_filter, form=form)
        require(
            bool(own) or not self.args,
            "algorithm.args has no effect: algorithm.loss, algorithm.advantage and "
            "algorithm.group_filter name none of your functions",
        )
        require(
            self.group_filter is None or not self.dynamic_sampling,
            "algorithm.dynamic_sampling is the built-in filter and algorithm.group_filter another "
            "one: remove one of them",
        )

    def _check_mask(self) -> None:
        """Require that a weight of 1, where engine and learner agree, lies within the bounds."""
        bounds, is_mask = self.weight_bounds, self.correction is Correction.mask
        require(
            bounds is None
            or (
                (len(bounds) == 2 and 0 <= bounds[0] < 1 <= bounds[1] < math.inf)
                and (bounds[1] > 1 if is_mask else bounds[0] == 0)
            ),
            "algorithm.weight_bounds must be null or [0, high] with high >= 1 (mask: [low, high] "
            f"with 0 <= low < 1 < high), got {bounds}",
        )
        bounds = self.geometric_mask
        require(
            bounds is None or (len(bounds) == 2 and 0 <= bounds[0] < 1 < bounds[1] < math.inf),
            "algorithm.geometric_mask must be null or [low, high] with 0 <= low < 1 < high, "
            f"got {bounds}",
        )

    def _check_nothing_is_ignored(self) -> None:
        defaults = {entry.name: entry.default for entry in fields(self)}
        for chosen, key in self._unread():
            value = getattr(self, key)
            require(
                value == defaults[key],
                f"algorithm.{key}={value} has no effect with algorithm.{chosen}; remove it, or set "
                f"it to its default {defaults[key]}",
            )

    def _unread(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of a choice and a setting that it leaves unused."""
        for key in dict.fromkeys(chain.from_iterable(LOSS_SETTINGS.values())):
            if key not in LOSS_SETTINGS.get(self.loss, ()):
                yield f"loss={self.loss}", key
        if self.correction is Correction.none:
            yield "correction=none", "weight_bounds"
        if self.kl is Kl.none:
            yield "kl=none", "kl_coefficient"
            yield "kl=none", "reference_every"
