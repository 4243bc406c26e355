"""Write docs/metrics.md, which lists every metric, from the table in `tracking/keys.py`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from april_rl.run.tracking.keys import KEYS, Key

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
_HEAD = """# Metrics

`python tools/metrics_page.py` writes this page from `april_rl/run/tracking/keys.py`: change
meanings there.

Each step of a run is one line of `metrics.jsonl`: `step`, then the metrics below. A `*` stands for
one part that the run decides: an age, a data source, a reward function, an evaluation set. Keys in
**bold** are frozen: they are renamed only with a line in the changelog. A metric that a step has no
value for is absent or null. Counts and seconds concern one step unless the meaning says
otherwise.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for stage, keys in groupby(KEYS, key=lambda key: key.stage):
        parts += [f"## {stage}\n", "| key | unit | meaning |", "|---|---|---|"]
        parts += [*map(_row, keys), ""]
    return "\n".join(parts).rstrip() + "\n"


def _row(key: Key) -> str:
    name = f"`{key.key}`"
    return f"| {f'**{name}**' if key.is_frozen else name} | {key.unit} | {key.meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
