"""TensorBoard: event files in RUN/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from april_rl.metrics import Histogram
from april_rl.run.tracking.backends import SAMPLE_COLUMNS, BackendSettings
from april_rl.run.tracking.figures import cut

_SHOWN_SAMPLES = 8


class TensorboardRun:
    """Event files of a run; `tensorboard --logdir outputs` shows all runs below outputs."""

    id = ""  # the run is found by its folder
    can_replace = True

    def __init__(self, settings: BackendSettings) -> None:
        self._writer = SummaryWriter(
            str(settings.run_dir / "tensorboard"), purge_step=settings.first_step
        )
        self._writer.add_text("run", settings.labels.name)

    def log(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Record the metrics of a step."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        for key, histogram in histograms.items():
            counts, edges = histogram.pair()
            centres = (edges[1:] + edges[:-1]) / 2
            self._writer.add_histogram_raw(
                key,
                min=float(edges[0]),
                max=float(edges[-1]),
                num=int(counts.sum()),
                sum=float((counts * centres).sum()),
                sum_squares=float((counts * centres**2).sum()),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.astype(np.float64).tolist(),
                global_step=step,
            )
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Sequence[object]]) -> None:
        """Record the first samples as a table in Markdown."""
        lines = ["| " + " | ".join(SAMPLE_COLUMNS) + " |", "|---" * len(SAMPLE_COLUMNS) + "|"]
        for row in rows[:_SHOWN_SAMPLES]:
            cells = (cut(str(cell)).replace("|", "\\|").replace("\n", " ") for cell in row)
            lines.append("| " + " | ".join(cells) + " |")
        self._writer.add_text("samples", "\n".join(lines), step)

    def finish(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        self._writer.close()
