"""Settings of low-rank adapters."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from april_rl.config.checks import check_bounds, require, within
from april_rl.config.choices import LoraSync

_MODULE = re.compile(r"\w+(\.\w+)*")
_LARGEST_RANK = 512  # the largest that vLLM's LoRA layers support


@dataclass(slots=True, kw_only=True)
class LoraConfig:
    """W + (alpha / rank) · B · A with W frozen (Hu et al. 2022, eq. 3)."""

    # r, rows of A and columns of B; null: no adapters, the whole model is trained
    rank: int | None = within(">= 1", None)
    alpha: float = within("> 0", 32.0)  # B · A is multiplied by alpha / rank
    # what a weight sync sends: merged, the whole weights, in which rounding to engine.dtype loses
    # small changes; adapter, only A and B (and W if the engine sleeps)
    sync: LoraSync = LoraSync.merged
    # linear layers of the decoder, by the end of their name (q_proj); null: all of them
    target_modules: list[str] | None = None

    def __post_init__(self) -> None:
        check_bounds("lora", self)
        names = self.target_modules
        require(
            names is None or (len(names) > 0 and all(map(_MODULE.fullmatch, names))),
            f"lora.target_modules must be null or names of layers, such as "
            f"[q_proj,v_proj], got {names}",
        )
        require(
            self.sync is LoraSync.merged or (self.rank or 0) <= _LARGEST_RANK,
            f"lora.rank={self.rank}: vLLM's LoRA layers have at most rank {_LARGEST_RANK}; lower "
            "it, or set lora.sync=merged",
        )
        for entry in fields(self) if self.rank is None else ():
            value = getattr(self, entry.name)
            require(
                value == entry.default,
                f"lora.{entry.name}={value} has no effect without lora.rank; set lora.rank, or "
                "remove it",
            )
