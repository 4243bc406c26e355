"""A sharded model that gives each response token a value in place of a log-probability.

Legend: [N] response tokens of a row, [H] hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from april_rl.training.learner.model.checkpoint import Checkpoint
from april_rl.training.learner.model.fused import fuse
from april_rl.training.learner.model.names import Part, TextPrefixes
from april_rl.training.learner.policy import Policy
from april_rl.training.learner.row import PackedRow


class ValueModel(Policy):
    """Maps a packed row to the value of the state in which each response token is sampled.

    It has the backbone of a language model and a linear head, which starts at 0 and is not in the
    checkpoint. Nothing is tied: the embedding is a unit of its own.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        temperature: float,
        prefixes: TextPrefixes = TextPrefixes(),  # noqa: B008 -- immutable
    ) -> None:
        super().__init__(causal_lm, temperature=temperature, prefixes=prefixes)
        hidden_size = causal_lm.config.get_text_config().hidden_size
        dtype = next(self.model.parameters()).dtype
        self.lm_head = nn.Linear(  # type: ignore[assignment]
            hidden_size, 1, bias=False, dtype=dtype, device="meta"
        )
        self.is_tied = False

    def forward(self, row: PackedRow) -> Tensor:  # type: ignore[override]
        """Return values [N], float32, with gradient."""
        values: Tensor = self.lm_head(self.hidden_states(row))
        return values.float().sum(dim=1)  # there is one column; FSDP2 cannot take a view

    def fuse(self) -> None:
        fuse(self.model)

    def materialise(self, checkpoint: Checkpoint, *, device: torch.device) -> None:
        """Load the backbone; the head starts at 0."""
        super().materialise(checkpoint, device=device)
        nn.init.zeros_(self.lm_head.get_parameter("weight"))

    def stored_tensors(self) -> Iterator[tuple[Part, Tensor]]:
        """Yield the tensors of the backbone, as `Policy.stored_tensors` does."""
        head = self.lm_head.get_parameter("weight")
        return ((part, tensor) for part, tensor in super().stored_tensors() if tensor is not head)

    def unread(self, prefixes: TextPrefixes) -> list[str]:
        """Return the names of the language model's output layer."""
        return [f"{prefixes.lm_head}weight", f"{prefixes.lm_head}bias"]
