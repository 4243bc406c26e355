"""Secrets of the machine in what a run shows of its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from april_rl.config.secrets import is_secret, masked
from april_rl.config.store import as_plain, compose_overrides, run_config, to_config
from april_rl.tracking.labels import run_labels
from april_rl.tracking.tracker import config_text

VALUE = "sk-opensesame-42"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("RAY_AUTH_TOKEN", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("pgpassword", True),
        ("MYSQL_PWD", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("PATH", False),
        ("OLDPWD", False),
        ("CUDA_VISIBLE_DEVICES", False),
    ],
)
def test_a_variable_is_secret_by_its_name(name: str, expected: bool) -> None:
    assert is_secret(name) is expected


def test_a_run_shows_references_and_a_resume_reads_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A key that a reference names, one that another setting repeats, and one that the shell has
    written out.
    """
    monkeypatch.setenv("TOOL_KEY", VALUE)
    monkeypatch.setenv("PLACE", "somewhere")
    overrides = [
        "+recipe=tiny_tools_cpu",
        "environment.args={key: '${oc.env:TOOL_KEY}', same: '${environment.args.key}'}",
        f"reward.args={{key: {VALUE}, url: 'http://me:{VALUE}@there'}}",
        "data.instruction=from ${oc.env:PLACE}",
    ]
    composed = compose_overrides(overrides)
    text = config_text(as_plain(composed))
    assert VALUE not in text
    assert "somewhere" not in text
    assert "http://me:${oc.env:TOOL_KEY}@there" in text
    (tmp_path / "config.yaml").write_text(text)
    again = run_config(tmp_path / "config.yaml")
    assert again == to_config(composed)
    assert again.environment.args == {"key": VALUE, "same": VALUE}
    monkeypatch.delenv("TOOL_KEY")
    elsewhere = run_config(tmp_path / "config.yaml")
    assert elsewhere.environment.args["key"] == "${oc.env:TOOL_KEY}"


def test_settings_without_variables_are_shown_as_they_are() -> None:
    composed = compose_overrides(["+recipe=tiny_cpu", "name=${data.path}"])
    assert as_plain(composed)["name"] == composed.data.path


def test_the_command_line_of_a_run_has_no_value_of_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOOL_KEY", VALUE)
    monkeypatch.setenv("SHORT_KEY", "1")
    labels = run_labels("r", overrides=[f"environment.args.key={VALUE}", "trainer.x=1"], seed=0)
    assert labels.overrides == ("environment.args.key=${oc.env:TOOL_KEY}", "trainer.x=1")
    assert VALUE not in f"{labels.name}{labels.group}"


def test_a_longer_word_that_holds_the_value_is_another_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOOR_PASSWORD", "sesame00")
    assert masked(["sesame00", "opensesame00"]) == ["${oc.env:DOOR_PASSWORD}", "opensesame00"]
