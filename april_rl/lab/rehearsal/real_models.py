"""The sizes and shapes of the models that a recipe names, also where the hub is out of reach."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedConfig

from april_rl.config import TrainConfig
from april_rl.config.choices import Advantage
from april_rl.config.lora import LoraConfig
from april_rl.errors import PreflightError
from april_rl.lab.rehearsal import stand_ins
from april_rl.lab.simulator.model_cost import Shape
from april_rl.start.planning.facts import Models, critic_sizes
from april_rl.start.planning.memory_inputs import Beside
from april_rl.start.planning.model import read_model
from april_rl.training.learner.model.model_sizes import model_sizes
from april_rl.training.learner.model.sizes import ModelSizes

# Names in config.json, by family: the experts of a layer, and those that a token chooses.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")


def real_models(config: TrainConfig, say: Callable[[str], None]) -> tuple[Models, Shape]:
    """Return the sizes of the policy and of the models beside it, and the policy's shape."""
    is_fused = config.learner.fused is not False
    policy = read_model(config_path(config.model.path, say, key="model.path"))
    beside = Beside()
    if config.teacher.path:
        path = config_path(config.teacher.path, say, key="teacher.path")
        beside = beside._replace(teacher=model_sizes(read_model(path), LoraConfig()))
    if config.algorithm.advantage == Advantage.gae:
        path = config_path(config.critic.path or config.model.path, say, key="critic.path")
        beside = beside._replace(critic=critic_sizes(read_model(path), is_fused=is_fused))
    sizes = model_sizes(policy, config.lora, is_fused=is_fused)
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


def shape_of(model: ModelSizes, config: PreTrainedConfig) -> Shape:
    """Return the shape of the model with this config.json."""
    text, share = config.get_text_config(), 1.0
    if model.expert_parameters:
        experts, chosen = (_first(text, names) for names in (_EXPERTS, _CHOSEN))
        share = chosen / experts if experts and chosen else 1.0
    idle = (1 - share) * model.expert_parameters
    return Shape(
        num_parameters=model.num_parameters,
        # A token is looked up in the embedding, and not multiplied with it.
        num_multiplied=model.num_parameters - model.embedding_unit - idle,
        num_layers=model.num_layers,
        kv_numbers=model.kv_numbers,
        # A query and a key are multiplied, then a weight and a value: four FLOPs for each number of
        # the output, which has two bytes. The normaliser, one or two per cent, counts too.
        attention_flops=2 * model.attention_bytes,
        expert_parameters=model.expert_parameters,
        chosen_share=share,
    )


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> float:
    """Return the first of these numbers that the configuration has, or 0."""
    values = config.to_dict()
    return next((float(values[name]) for name in names if values.get(name)), 0.0)
