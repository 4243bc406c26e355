"""Find texts that end a turn. vLLM itself does this above the engine core, where it decodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from transformers import AutoTokenizer, PreTrainedTokenizerBase


class StopTexts:
    """Finds texts in tokens; the tokenizer is loaded for the first request that has some."""

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self._model_path)

    def end(self, texts: Sequence[str], token_ids: Sequence[int], *, num_new: int) -> int | None:
        """Return the number of tokens up to the end of the first text that ends within the last
        `num_new` tokens, or None.
        """
        # A token may be only a part of a character.
        num_read = num_new + max(len(text.encode()) for text in texts)
        first = max(0, len(token_ids) - num_read)
        for end in range(len(token_ids) - num_new + 1, len(token_ids) + 1):
            said = self._tokenizer.decode(list(token_ids[first:end]), skip_special_tokens=True)
            if any(text in said for text in texts):
                return end
        return None
