"""The size of the project: numbers that only fall."""

import re
from collections.abc import Iterable
from pathlib import Path

from source_tree import PACKAGE, ROOT, TESTS

ALONE = ("answers", "jail", "lab", "trl")  # the core is all of the package but these


def num_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_the_project_is_not_larger_than_its_budget() -> None:
    """budget.txt is lowered to what was reached, to the next hundred (settings exactly)."""
    alone = {door: num_lines((PACKAGE / door).rglob("*.py")) for door in ALONE}
    settings = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")]
    found = {
        "core": num_lines(PACKAGE.rglob("*.py")) - sum(alone.values()),
        "training": num_lines((PACKAGE / "training").rglob("*.py")),
        **alone,
        "tests": num_lines(TESTS.rglob("*.py")),
        "tools": num_lines((ROOT / "tools").rglob("*.py")),
        "settings": len(set(re.findall(r"^\| `([^`]+)`", settings, re.MULTILINE))),
        "words of pages": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }
    text = (TESTS / "project" / "budget.txt").read_text(encoding="utf-8")
    budget = {
        name: int(limit.replace(",", "")) for name, limit in re.findall(r"(.+): ([\d,]+)", text)
    }
    assert found.keys() == budget.keys()
    assert {name: found[name] for name in found if found[name] > budget[name]} == {}
    for name, limit in budget.items():
        step = 1 if name == "settings" else 100
        assert limit - found[name] < step, f"lower {name} to what was reached: {found[name]:,}"
