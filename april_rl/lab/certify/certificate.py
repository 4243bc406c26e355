"""A certificate: what was compared, how far it was apart, how far it may be, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from april_rl.lab.report.html import page, table


class CertificateRow(NamedTuple):
    """One comparison."""

    name: str
    compared: str
    found: str  # the differences, in words
    limit: str  # how large they may be, and where that comes from
    passes: bool


def write_certificate(
    folder: Path, rows: Sequence[CertificateRow], *, model: str, about: Mapping[str, str]
) -> Path:
    """Write certificate.json and certificate.html into `folder`; return the path of the page."""
    path = folder / "certificate.html"
    content = {"model": model, "about": {**about}, "rows": [row._asdict() for row in rows]}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    facts = "".join(f"<dt>{escape(key)}</dt><dd>{escape(about[key])}</dd>" for key in about)
    heads = ("", "compared", "difference", "limit", "")
    title = f"Do transformers, learner and engine compute the same {model}?"
    body = (
        f"<h1>{escape(title)}</h1>{table(heads, map(_cells, rows))}<details><summary>versions "
        f"and settings</summary><dl>{facts}</dl></details>"
    )
    path.write_text(page(title, [body], has_charts=False), "utf-8")
    return path


def _cells(row: CertificateRow) -> list[str]:
    return [*map(escape, row[:-1]), "pass" if row.passes else '<b class="cut">FAIL</b>']
