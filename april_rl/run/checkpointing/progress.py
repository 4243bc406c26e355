"""The progress of a run, which its checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from april_rl.metrics import Metrics


@dataclass(slots=True, kw_only=True)
class Progress:
    """The versions that were reached, evaluated and exported, and metrics not logged yet."""

    version: int = 0  # policy version, counted in steps
    evaluated: int | None = None  # the version that was evaluated last
    exported: int | None = None  # the version that was exported last
    counted: Metrics = field(default_factory=Metrics)  # added to the next step's row
    row: Metrics | None = None  # metrics of the last step until they are logged

    def save(self, *, with_row: bool) -> dict[str, Any]:
        """Return everything as plain data; `with_row` includes `row`, if it was not logged yet."""
        row = self.row.save() if self.row is not None and with_row else None
        return {
            "version": self.version,
            "evaluated": self.evaluated,
            "exported": self.exported,
            "counted": self.counted.save(),
            "row": row,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Progress:
        return cls(
            version=state["version"],
            evaluated=state["evaluated"],
            exported=state["exported"],
            counted=Metrics.restore(state["counted"]),
            row=Metrics.restore(state["row"]) if state["row"] else None,
        )
