"""Scale a scenario down so that its simulation is cheap and its times stay the same."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from statistics import fmean

from april_rl.lab.simulator.engine_cost import EngineCost
from april_rl.lab.simulator.length_distributions import Recorded
from april_rl.lab.simulator.outcome import Scale
from april_rl.lab.simulator.simulation import Scenario

# A simulated step costs about 0.1 ms a sample and 0.05 ms a tick. These limits keep it to a few
# thousand samples and ticks, and a tick is still a small part of a response.
_MEAN_TOKENS, _MAX_SAMPLES, _MAX_ENGINES = 64, 1024, 8


def scale_down(real: Scenario) -> Scenario:
    """Return a scenario with recorded lengths, made smaller if it is large. Its `scale` says how
    many tokens, groups and engines each simulated one stands for. The cost is scaled too, so
    that times stay the same.
    """
    assert isinstance(real.length_of, Recorded)
    assert real.turns is None  # observations would have to be scaled
    recorded = real.length_of.groups
    tokens = max(1.0, fmean(chain.from_iterable(recorded)) / _MEAN_TOKENS)
    num_groups = min(real.num_groups, math.ceil(_MAX_SAMPLES / real.group_size))
    num_engines = min(real.num_engines, _MAX_ENGINES)
    scale = Scale(
        tokens=tokens,
        groups=real.num_groups / num_groups,
        engines=real.num_engines / num_engines,
    )
    samples = scale.groups / scale.engines  # samples of each engine
    groups = [[max(1, round(length / tokens)) for length in group] for group in recorded]
    return replace(
        real,
        cost=EngineCost(
            step_s=tokens * real.cost.step_s,
            sample_s=tokens * samples * real.cost.sample_s,
            context_token_s=tokens**2 * samples * real.cost.context_token_s,
            prefill_token_s=tokens * samples * real.cost.prefill_token_s,
        ),
        length_of=replace(real.length_of, groups=groups),
        num_groups=num_groups,
        max_response_tokens=math.ceil(real.max_response_tokens / tokens),
        prompt_tokens=max(1, round(real.prompt_tokens / tokens)),
        num_engines=num_engines,
        tick_steps=max(1, round(real.tick_steps / tokens)),
        max_batched_tokens=max(1, round(real.max_batched_tokens / samples)),
        block_tokens=max(1, round(real.block_tokens / tokens)),
        scale=scale,
    )
