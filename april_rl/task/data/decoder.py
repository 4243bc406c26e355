"""Decode token ids in a process without transformers, whose import takes seconds and GiB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class BackendDecoder:
    """The decoding part of a Hugging Face tokenizer.

    It is pickled by value, not as a path, so a reward process decodes exactly as the controller
    does, including what transformers changed while loading the files.
    """

    backend: Tokenizer

    def __call__(self, token_ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=True))
