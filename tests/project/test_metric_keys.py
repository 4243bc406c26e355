"""Every metric has one line of meaning and a unit, and docs/metrics.md shows that table."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator

from source_tree import ROOT, package_files, tree_of

sys.path.insert(0, str(ROOT / "tools"))

import metric_keys
from metrics_page import PAGE, page

from april_rl.run.tracking import keys

STAGES = {key.stage for key in keys.KEYS}


def test_the_metrics_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tools/metrics_page.py"


def test_every_metric_is_described_once_with_a_unit() -> None:
    assert [key for key, n in Counter(key.key for key in keys.KEYS).items() if n > 1] == []
    assert [key.key for key in keys.KEYS if not (key.unit and key.meaning)] == []


def test_a_key_without_a_line_is_named() -> None:
    assert metric_keys.undescribed_keys(["step", "reward/mean", "reward/maen"]) == ["reward/maen"]


def literal_keys() -> Iterator[tuple[str, str]]:
    """Yield every file and string in the package that has the form of a metric key, without
    f-strings; test_runs.py compares what a whole run logs.
    """
    form = re.compile(rf"(?:{'|'.join(STAGES)})/[a-z0-9_/]+")
    for path in package_files():
        nodes = list(ast.walk(tree_of(path)))
        parts = {id(v) for node in nodes if isinstance(node, ast.JoinedStr) for v in node.values}
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in parts:
                text = str(node.value)
                if form.fullmatch(text):
                    yield path.name, text


def test_every_key_written_in_the_package_is_described() -> None:
    found = set(literal_keys())
    assert len(found) > 60
    unknown = {(file, key) for file, key in found if metric_keys.describe(key) is None}
    assert unknown == set()
