"""The page that lists every metric, written from the table in april_rl/tracking/keys.py.

python tools/metrics_page.py           # write docs/metrics.md
python tools/metrics_page.py --check   # compare with docs/metrics.md; exit status 1: it differs
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path

from april_rl.tracking.keys import KEYS, Key

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
_HEAD = """# Metrics

`python tools/metrics_page.py` writes this page from `april_rl/tracking/keys.py`: change meanings
there.

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


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    is_current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
    if not is_current:
        print(f"{PAGE} is not up to date: run python tools/metrics_page.py", file=sys.stderr)
    return 0 if is_current else 1


if __name__ == "__main__":
    sys.exit(main())
