"""Processes of environments: what reaches them, what they may use, and what they leave behind."""

from __future__ import annotations

import json

import pytest
from episodes import answer, fresh, heard, pool, said
from own_process import in_own_process


def _variables_seen(notes):
    with pool("Variables", secrets=["TOOL_KEY"]) as environments:
        answer(environments, said(heard(environments, fresh(notes=notes)), "a"))


@pytest.mark.slow
def test_secrets_of_the_machine_reach_no_environment_but_by_a_setting(monkeypatch, tmp_path):
    """Neither its process nor the programs that it starts."""
    for name in ("HF_TOKEN", "TOOL_KEY", "PLACE"):
        monkeypatch.setenv(name, "1234")
    in_own_process(_variables_seen, tmp_path / "notes")
    for line in (tmp_path / "notes").read_text().splitlines():
        seen = json.loads(line)
        assert "HF_TOKEN" not in seen
        assert (seen["TOOL_KEY"], seen["PLACE"]) == ("1234", "1234")
