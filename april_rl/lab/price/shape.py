"""The shape of a model, on which its speed depends, from its sizes and its config.json."""

from __future__ import annotations

from transformers import PreTrainedConfig

from april_rl.lab.simulator.model_cost import Shape
from april_rl.training.learner.model.sizes import ModelSizes

# Names in config.json, by family: the experts of a layer, and those that a token chooses.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")


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
