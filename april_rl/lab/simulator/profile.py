"""The response lengths of a policy before training, and the settings that they call for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from april_rl.lab.simulator.length_statistics import waitless_staleness
from april_rl.lab.simulator.prediction import Prediction

_NUM_BINS, _BAR = 12, 40  # rows of the histogram, characters of its longest bar
_WORTH_IT = 1.05  # smallest gain in samples per second that is worth it
_ALMOST_BEST = 0.97  # share of the largest gain that is enough: a smaller α gives fresher samples
_FULL = 0.9  # share of the slots in use above which the staleness cap costs little
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

    def figures(self) -> dict[str, object]:
        """Return every figure by name."""
        shares = {"truncated_frac": self.truncated_frac, "no_signal_frac": self.no_signal_frac}
        return {"lengths": self.lengths, "percentiles": self.percentiles, **shares}

    def waitless_staleness(self, factor: float) -> int:
        """Return the `rollout.max_staleness` at which no step waits for its oldest groups."""
        mean, longest = float(np.mean(self._flat)), max(self._flat)
        return waitless_staleness(factor, longest=longest, mean=mean)

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


def advice(profile: Profile, predictions: Sequence[Prediction], *, max_staleness: int) -> list[str]:
    """Return advice on what to set; the first of the predictions is the synchronous loop."""
    best = max((each.gain for each in predictions[1:]), default=1.0)
    found = []
    if best < _WORTH_IT:
        found.append(
            "Response lengths have hardly any tail: rollout.over_sampling_factor=1 and "
            f"rollout.refill=false lose at most {max(0.0, best - 1):.0%}, and every token is fresh."
        )
    else:
        chosen = next(each for each in predictions[1:] if each.gain >= _ALMOST_BEST * best)
        stale = chosen.outcome.off_policy_token_frac
        found.append(
            f"rollout.over_sampling_factor={chosen.mode.factor:g}: {chosen.gain - 1:+.0%} "
            f"samples/s over the synchronous loop, {stale:.0%} of the trained tokens from an "
            "earlier policy."
        )
        found.extend(_staleness(profile, chosen, max_staleness))
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


def _staleness(profile: Profile, chosen: Prediction, max_staleness: int) -> Iterator[str]:
    free = profile.waitless_staleness(chosen.mode.factor)
    if free > max_staleness and chosen.outcome.occupancy < _FULL:
        yield (
            f"rollout.max_staleness={free} lets no step wait for its longest responses at that α; "
            f"with {max_staleness}, {chosen.outcome.occupancy:.0%} of the slots are in use."
        )
