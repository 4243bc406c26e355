"""Settings of the profiler."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class ProfilerConfig:
    """Steps to trace; the report makes profile/step_N.trace.json.gz, for ui.perfetto.dev."""

    # steps to trace, such as [5,6]; the first two are slower than others
    steps: list[int] = field(default_factory=list)
