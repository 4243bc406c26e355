"""Scale a scenario down so that its simulation is cheap and its times stay the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean

from april_rl.lab.simulator.engine_cost import EngineCost
from april_rl.lab.simulator.length_distributions import Recorded
from april_rl.lab.simulator.simulation import Scenario

# A simulated step costs about 0.1 ms a sample and 0.05 ms a tick. With these its samples and ticks
# are at most a few thousand, and a tick is still a small part of a response.
_MEAN_TOKENS, _MAX_SAMPLES, _MAX_ENGINES = 64, 1024, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledDown:
    """A scenario in which each token and each sample stands for several."""

    scenario: Scenario
    kv_tokens: float  # tokens of all real engines for each that a simulated one holds


def scaled_down(real: Scenario, lengths: Sequence[Sequence[int]]) -> ScaledDown:
    """Return `real` with recorded `lengths` in tokens [groups, G], made smaller where it is large.

    A token stands for `tokens`, so an engine step for as many; a sample of an engine stands for
    `samples`. The cost follows, so that seconds stay what they are.
    """
    tokens = max(1.0, fmean(chain.from_iterable(lengths)) / _MEAN_TOKENS)
    num_groups = min(real.num_groups, math.ceil(_MAX_SAMPLES / real.group_size))
    num_engines = min(real.num_engines, _MAX_ENGINES)
    samples = (real.num_groups / real.num_engines) / (num_groups / num_engines)
    groups = [[max(1, round(length / tokens)) for length in group] for group in lengths]
    small = replace(
        real,
        cost=EngineCost(
            step_s=tokens * real.cost.step_s,
            sample_s=tokens * samples * real.cost.sample_s,
            context_token_s=tokens**2 * samples * real.cost.context_token_s,
            prefill_token_s=tokens * samples * real.cost.prefill_token_s,
        ),
        length_of=Recorded(groups=groups, seed=real.seed),
        num_groups=num_groups,
        max_response_tokens=math.ceil(real.max_response_tokens / tokens),
        prompt_tokens=max(1, round(real.prompt_tokens / tokens)),
        num_engines=num_engines,
        tick_steps=max(1, round(real.tick_steps / tokens)),
        max_batched_tokens=max(1, round(real.max_batched_tokens / samples)),
        block_tokens=max(1, round(real.block_tokens / tokens)),
    )
    return ScaledDown(scenario=small, kv_tokens=tokens * samples * real.num_engines)
