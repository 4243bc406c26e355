"""Where a response ends."""

from __future__ import annotations

from transformers import AutoTokenizer, GenerationConfig


def stop_token_ids(model_path: str) -> list[int]:
    """The end tokens of the model's generation config, else its tokenizer's; sorted.

    Raises ValueError when neither names one: every response would run to its token budget.
    """
    try:
        named = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # no generation_config.json
        named = None
    if named is None:
        named = AutoTokenizer.from_pretrained(model_path).eos_token_id
    if named is None:
        raise ValueError(
            f"model.path: {model_path} names no end token, neither eos_token_id in "
            "generation_config.json nor eos_token of the tokenizer; add one of them"
        )
    return sorted({named} if isinstance(named, int) else set(named))
