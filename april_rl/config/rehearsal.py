"""Settings of a rehearsal (`python -m april_rl rehearse`); training ignores them."""

from __future__ import annotations

from dataclasses import dataclass, field

from april_rl.config.checks import above, at_least


@dataclass(slots=True, kw_only=True)
class RehearsalConfig:
    """Assumptions about the machine and the model, and findings to accept."""

    gpu_gib: float = 80.0  # memory of one GPU, for the memory plan
    mean_response_tokens: int = 0  # expected mean; 0: half of rollout.max_response_tokens
    accept: list[str] = field(default_factory=list)  # names of findings that are intended

    def __post_init__(self) -> None:
        above("rehearsal", 0, gpu_gib=self.gpu_gib)
        at_least("rehearsal", 0, mean_response_tokens=self.mean_response_tokens)
