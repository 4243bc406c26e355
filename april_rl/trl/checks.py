"""Checks whether a trainer of TRL can have partial rollouts."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import trl
from trl import GRPOTrainer

from april_rl.errors import RunError
from april_rl.trl.engine import has_packed_weights

_VERSION = "1.16"
# Private parts of TRL that this package uses.
_PRIVATE = (
    *("_generate_single_turn", "_generate_and_score_completions", "_tokenize_prompts"),
    *("_load_optimizer_and_scheduler", "_save_checkpoint", "_last_loaded_step", "_metrics"),
    "_step",
)
# Sampling that depends on all tokens of a completion; `stop` and min_tokens can be continued.
_WHOLE_RESPONSE = (
    *("vllm_structured_outputs_regex", "structured_outputs"),
    *("presence_penalty", "frequency_penalty"),
)


class TrlError(RunError):
    """A trainer that cannot have partial rollouts; the message names the argument."""


def check_trainer(trainer: GRPOTrainer, factor: float) -> None:
    """Raise TrlError for an unsupported trainer."""
    if not trl.__version__.startswith(f"{_VERSION}."):
        raise TrlError(f"trl must be {_VERSION}, whose internals this uses; got {trl.__version__}")
    args = trainer.args
    local = args.per_device_train_batch_size * args.steps_per_generation
    columns = set(trainer.train_dataset.column_names or ())
    required = {
        "use_vllm=True and vllm_mode=colocate": trainer.use_vllm
        and trainer.vllm_mode == "colocate",
        "vllm_tensor_parallel_size=1": args.vllm_tensor_parallel_size == 1,
        "no rollout_func": trainer.rollout_func is None,
        "no tools and no environment_factory": not trainer.tools
        and trainer.environment_factories is None,
        "a train_dataset with a length": isinstance(trainer.train_dataset, Sized),
        "no images": not columns & {"image", "images"},
        f"num_generations={trainer.num_generations} to divide the {local} completions that a "
        "process has of a batch (per_device_train_batch_size × steps_per_generation)": local
        % trainer.num_generations
        == 0,
        "vllm_importance_sampling_correction=True with over_sampling_factor > 1, since tokens of "
        "earlier policies need a weight": factor == 1
        or trainer.vllm_importance_sampling_correction,
        "over_sampling_factor >= 1": factor >= 1,
    }
    for condition, holds in required.items():
        if not holds:
            raise TrlError(f"partial rollouts need {condition}")
    if missing := sorted(set(_PRIVATE) - set(dir(trainer))):
        raise TrlError(f"this trainer lacks {', '.join(missing)}, which partial rollouts need")


def check_sampling(trainer: GRPOTrainer, *, is_synchronous: bool) -> None:
    """Raise TrlError for sampling that would differ from TRL's, and for an engine without
    weights.
    """
    own = trainer.vllm_generation
    given = own.generation_kwargs
    if own.structured_outputs_regex is not None:
        given = {**given, "vllm_structured_outputs_regex": own.structured_outputs_regex}
    named = sorted(name for name in _WHOLE_RESPONSE if given.get(name))
    if named and not is_synchronous:
        raise TrlError(
            f"{', '.join(named)} cannot be used with partial rollouts: it looks at all tokens of a "
            "completion, and vLLM sees only the new ones of a resumed sample; leave it out, or use "
            "over_sampling_factor=1, refill=False"
        )
    max_tokens = max_tokens_of(trainer)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise TrlError(f"generation_kwargs: max_tokens must be at least 1, got {max_tokens}")
    if wrong := sorted({"output_kind", "logprobs"} & given.keys()):
        raise TrlError(f"generation_kwargs: partial rollouts set {', '.join(wrong)} themselves")
    if given.get("n", 1) != 1:
        raise TrlError(f"generation_kwargs: n={given['n']}; set num_generations instead")
    if has_packed_weights(own.llm):
        raise TrlError(
            "vLLM's CPU build has packed the weights of this engine, so that the weight sync of "
            "TRL fails, also without partial rollouts: import april_rl.trl before the GRPOTrainer "
            "is made, which keeps them"
        )


def max_tokens_of(trainer: GRPOTrainer) -> Any:  # noqa: ANN401
    """Return the longest completion: generation_kwargs come before max_completion_length in TRL."""
    own = trainer.vllm_generation.generation_kwargs
    return own.get("max_tokens", trainer.max_completion_length)
