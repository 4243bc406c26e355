"""Settings of the profiler."""

from __future__ import annotations

from dataclasses import dataclass, field

from april_rl.config.checks import check_bounds, within


@dataclass(slots=True, kw_only=True)
class ProfilerConfig:
    """Steps to trace: profile/step_N.trace.json.gz, for ui.perfetto.dev."""

    # steps to trace, such as [5,6]; the first two are slower than others
    steps: list[int] = field(default_factory=list)
    # engine ticks of a step with torch's operators and kernels; all others are ranges without them
    num_ticks: int = within(">= 0", 4)
    num_workers: int = within(">= 1", 1)  # number of workers that are traced, from rank 0 on

    def __post_init__(self) -> None:
        check_bounds("profiler", self)
