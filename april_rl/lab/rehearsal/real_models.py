"""The sizes of the models that a recipe names, also where the hub is out of reach."""

from __future__ import annotations

from collections.abc import Callable

from april_rl.config import TrainConfig
from april_rl.config.choices import Advantage
from april_rl.config.lora import LoraConfig
from april_rl.errors import PreflightError
from april_rl.lab.price.shape import shape_of
from april_rl.lab.rehearsal import stand_ins
from april_rl.lab.simulator.model_cost import Shape
from april_rl.start.planning.facts import Models, critic_sizes
from april_rl.start.planning.memory_inputs import Beside
from april_rl.start.planning.model import read_model
from april_rl.training.learner.model.model_sizes import model_sizes


def real_models(config: TrainConfig, say: Callable[[str], None]) -> tuple[Models, Shape]:
    """Return the sizes of the policy and of the models beside it, and the policy's shape."""
    policy = read_model(config_path(config.model.path, say, key="model.path"))
    beside = Beside()
    if config.teacher.path:
        path = config_path(config.teacher.path, say, key="teacher.path")
        beside = beside._replace(teacher=model_sizes(read_model(path), LoraConfig()))
    if config.algorithm.advantage == Advantage.gae:
        path = config_path(config.critic.path or config.model.path, say, key="critic.path")
        beside = beside._replace(critic=critic_sizes(read_model(path)))
    sizes = model_sizes(policy, config.lora)
    return Models(policy=sizes, beside=beside), shape_of(sizes, policy)


def config_path(path: str, say: Callable[[str], None], *, key: str) -> str:
    """Return where a model's config.json is, or the published one that stands in for it."""
    try:
        read_model(path, key=key)
    except PreflightError:
        stand_in = stand_ins.model_config(path)
        if stand_in is None:
            raise
        say(f"model       {path} is out of reach: using its published sizes")
        return stand_in
    return path
