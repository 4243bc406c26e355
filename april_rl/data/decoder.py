"""Token ids to text in a process without transformers, whose import takes seconds and GiB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class BackendDecoder:
    """The part of a Hugging Face tokenizer that decodes; pickled as what it is, not as a path.

    So it decodes as the controller's does, whatever transformers changed when it loaded the files.
    """

    backend: Tokenizer

    def __call__(self, token_ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=True))
