"""Settings of a rehearsal (`python -m april_rl rehearse`); training ignores them."""

from __future__ import annotations

from dataclasses import dataclass, field

from april_rl.config.checks import check_bounds, within


@dataclass(slots=True, kw_only=True)
class RehearsalConfig:
    """Assumptions about the machine and the model, and findings to accept."""

    gpu_gib: float = within("> 0", 80.0)  # memory of one GPU, for the memory plan
    # expected mean; 0: half of rollout.max_response_tokens
    mean_response_tokens: int = within(">= 0", 0)
    accept: list[str] = field(default_factory=list)  # names of findings that are intended

    def __post_init__(self) -> None:
        check_bounds("rehearsal", self)
