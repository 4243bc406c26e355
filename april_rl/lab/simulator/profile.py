"""The response lengths of a policy before training, and what over-sampling would gain with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from april_rl.lab.simulator.scaled_down import scaled_down
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.rollout.over_sampling import FixedFactor

_NUM_STEPS, _WARMUP_STEPS = 12, 6
_NUM_BINS, _BAR = 12, 40  # rows of the histogram, characters of its longest bar
_WORTH_IT = 1.05  # a gain in samples per second
_ALMOST_BEST = 0.97  # of the largest gain: a smaller α is fresher
_TRUNCATED = 0.2  # share of cut responses above which the advice mentions them


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The responses of a policy to prompts of its training data."""

    lengths: tuple[tuple[int, ...], ...]  # response tokens of the samples of each prompt
    truncated_frac: float  # share of the samples that were cut at the budget
    no_signal_frac: float  # share of the prompts whose samples have equal rewards

    @property
    def percentiles(self) -> dict[str, int]:
        """Return the median, the 95th and 99th percentile and the maximum, in tokens."""
        found = np.percentile(self._flat, [50, 95, 99, 100], method="higher")
        return dict(zip(("p50", "p95", "p99", "max"), map(int, found), strict=True))

    @property
    def _flat(self) -> list[int]:
        return list(chain.from_iterable(self.lengths))

    def histogram(self) -> list[str]:
        """Return a line for each range of lengths, with a bar and its share of the samples."""
        counts, edges = np.histogram(self._flat, bins=_NUM_BINS, range=(0, max(self._flat)))
        width = len(f"{edges[-1]:.0f}")
        return [
            f"{low:{width}.0f} – {high:{width}.0f}  "
            f"{'█' * round(_BAR * count / counts.max()):{_BAR}}  {count / counts.sum():6.1%}"
            for low, high, count in zip(edges, edges[1:], counts, strict=False)
        ]


def predicted(
    profile: Profile, scenario: Scenario, *, refill: bool, factors: Sequence[float]
) -> list[dict[str, object]]:
    """Simulate training on such lengths, synchronous and with each α; return a row for each:
    `Outcome.figures` with its `mode`, and its `gain` in samples/s over the synchronous loop.

    `scenario` is the run with the engine's real cost; a large one is simulated in small.
    """
    small = scaled_down(scenario, profile.lengths).scenario
    modes = [("synchronous", 1.0, False)]
    modes += [("refill" if refill else "one-shot", α, refill) for α in factors if α > 1]
    outcomes = [
        simulate(
            small,
            over_sampling=FixedFactor(factor),
            refill=with_refill,
            num_steps=_NUM_STEPS,
            warmup_steps=_WARMUP_STEPS,
        )
        for _, factor, with_refill in modes
    ]
    base = outcomes[0].trained_samples_per_s
    return [
        {"mode": mode, **outcome.figures(), "gain": outcome.trained_samples_per_s / base}
        for (mode, _, _), outcome in zip(modes, outcomes, strict=True)
    ]


def advice(profile: Profile, rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return what to set, in words; `rows` are those of `predicted`."""
    gains = {float(str(row["over_sampling_factor"])): float(str(row["gain"])) for row in rows[1:]}
    best = max(gains.values(), default=1.0)
    found = []
    if best < _WORTH_IT:
        found.append(
            "Response lengths have hardly a tail: rollout.over_sampling_factor=1 and "
            f"rollout.refill=false lose at most {max(0.0, best - 1):.0%}, and every token is fresh."
        )
    else:
        chosen = min(factor for factor, gain in gains.items() if gain >= _ALMOST_BEST * best)
        row = next(row for row in rows[1:] if row["over_sampling_factor"] == chosen)
        found.append(
            f"rollout.over_sampling_factor={chosen:g}: {gains[chosen] - 1:+.0%} samples/s over the "
            f"synchronous loop, {row['off_policy_token_frac']:.0%} of the trained tokens from an "
            "earlier policy."
        )
    if profile.truncated_frac > _TRUNCATED:
        found.append(
            f"{profile.truncated_frac:.0%} of the responses reach rollout.max_response_tokens and "
            "are cut: a larger budget would show a longer tail."
        )
    if profile.no_signal_frac > 0:
        found.append(
            f"{profile.no_signal_frac:.0%} of the prompts have equal rewards for all samples; "
            "algorithm.dynamic_sampling=true generates others in their place."
        )
    return found
