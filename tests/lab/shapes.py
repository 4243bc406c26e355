"""Shapes of the models of the memory plan's tests."""

from planned_models import config_of, sizes_of

from april_rl.lab.rehearsal.real_models import shape_of
from april_rl.lab.simulator.model_cost import Shape


def shape_by_name(name: str) -> Shape:
    """Return the shape of a model of `HUB` or `MODELS`."""
    return shape_of(sizes_of(name), config_of(name))
