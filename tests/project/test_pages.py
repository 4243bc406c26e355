"""Pages that name many settings, and metrics, of the code."""

from __future__ import annotations

import re

from source_tree import ROOT, package_files

from april_rl.config.store import compose_overrides
from april_rl.tracking.figures import HEADING
from april_rl.tracking.keys import undescribed


def unknown_settings(text: str) -> set[str]:
    """Settings in back quotes that are none, among words of the form section.key."""
    config = compose_overrides(["+recipe=tiny_cpu"])
    keys = {tuple(key.split(".")) for key in re.findall(r"`([a-z]+\.[a-z_]+)", text)}
    files = {"md", "html", "txt", "yaml"}
    return {
        f"{section}.{key}"
        for section, key in keys
        if key not in files and (section not in config or key not in config[section])
    }


def test_settings_in_the_first_column_for_newcomers_exist() -> None:
    """Fails when a setting is renamed and the page for users of other trainers is not."""
    lines = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8").splitlines()
    first = " ".join(line.split("|")[1] for line in lines if line.startswith("| "))
    assert len(re.findall(r"`[a-z]+\.[a-z_]+", first)) > 30
    assert unknown_settings(first) == set()


def test_settings_and_metrics_of_the_page_on_trouble_exist() -> None:
    text = (ROOT / "docs" / "trouble.md").read_text(encoding="utf-8")
    assert unknown_settings(text) == set()
    metrics = set(re.findall(r"`([a-z]+/[a-z_]+)`", text))
    assert len(metrics) > 8
    assert undescribed(metrics) == []


def test_the_checklist_for_gpus_has_the_lines_that_a_run_prints() -> None:
    """Fails when a message or a column is renamed and the page is not."""
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    checklist = text[: text.index("## The acceptance script")]
    assert unknown_settings(checklist) == set()
    assert f"\n{HEADING}\n" in checklist
    code = "".join(path.read_text(encoding="utf-8") for path in package_files())
    said = (
        "memory of a worker",
        "starting vLLM",
        "made no progress",
        "engine and learner disagree",
    )
    assert [words for words in said if words not in checklist or words not in code] == []
