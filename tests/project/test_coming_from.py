"""docs/coming_from.md: settings of other trainers, and ours beside them."""

from __future__ import annotations

import re

from source_tree import ROOT

from april_rl.config.store import compose_overrides


def test_settings_in_the_first_column_exist() -> None:
    """Fails when a setting is renamed and the page is not."""
    lines = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8").splitlines()
    first = [line.split("|")[1] for line in lines if line.startswith("| ")]
    keys = {key for cell in first for key in re.findall(r"`([a-z]+\.[a-z_]+)", cell)}
    assert len(keys) > 30
    config = compose_overrides(["+recipe=tiny_cpu"])
    assert {key for key in keys if key.split(".")[1] not in config[key.split(".")[0]]} == set()
