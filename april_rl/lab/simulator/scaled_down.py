"""Scale a scenario down so that its simulation is cheap and its times stay the same."""

from __future__ import annotations

import math
from dataclasses import replace

from april_rl.lab.simulator.engine_cost import ScaledCost
from april_rl.lab.simulator.length_distributions import mean_of
from april_rl.lab.simulator.outcome import Scale
from april_rl.lab.simulator.simulation import Scenario

# A simulated step costs about 0.1 ms a sample and 0.05 ms a tick. These limits keep it to a few
# thousand samples and ticks, and a tick is still a small part of a response.
_MEAN_TOKENS, _MAX_SAMPLES, _MAX_ENGINES = 64, 1024, 8
_TURN_TOKENS = 8  # that a turn has at least, since its tokens are whole numbers


def scale_down(real: Scenario) -> Scenario:
    """Return a scenario that is made smaller if it is large. Its `scale` says how many tokens,
    groups and engines each simulated one stands for. The cost is scaled too, so that times stay
    the same.
    """
    mean = mean_of(real.length_of, cap=real.max_response_tokens)
    turns, num_turns = real.turns, real.turns.num_turns if real.turns else 1
    tokens = max(1.0, mean / max(_MEAN_TOKENS, _TURN_TOKENS * num_turns))
    if turns is not None:
        turns = replace(turns, observation_tokens=round(turns.observation_tokens / tokens))
    num_groups = min(real.num_groups, math.ceil(_MAX_SAMPLES / real.group_size))
    num_engines = min(real.num_engines, _MAX_ENGINES)
    scale = Scale(
        tokens=tokens, groups=real.num_groups / num_groups, engines=real.num_engines / num_engines
    )
    samples = scale.groups / scale.engines  # samples of each engine
    is_small = tokens == samples == 1
    return replace(
        real,
        cost=real.cost if is_small else ScaledCost(real=real.cost, tokens=tokens, samples=samples),
        length_of=lambda sample_id: max(1, round(real.length_of(sample_id) / tokens)),
        num_groups=num_groups,
        max_response_tokens=math.ceil(real.max_response_tokens / tokens),
        prompt_tokens=max(1, round(real.prompt_tokens / tokens)),
        num_engines=num_engines,
        tick_steps=max(1, round(real.tick_steps / tokens)),
        max_batched_tokens=max(1, round(real.max_batched_tokens / samples)),
        block_tokens=max(1, round(real.block_tokens / tokens)),
        turns=turns,
        scale=scale,
    )
