"""Secrets of the machine in the settings that a run shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from april_rl.config.secrets import is_secret, mask
from april_rl.config.store import as_plain, compose_overrides, run_config, to_config
from april_rl.run.tracking.labels import run_labels
from april_rl.run.tracking.tracker import config_text

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
        ("SSH_AUTH_SOCK", True),
        ("HTTP_AUTHORIZATION", True),
        ("GITHUB_PAT", True),
        ("SENTRY_DSN", True),
        ("SLACK_WEBHOOK_URL", True),
        ("DATABASE_URL", True),
        ("GIT_AUTHOR_NAME", False),
        ("XAUTHORITY", False),
        ("KEYBOARD_LAYOUT", False),
        ("COMPASS_HOME", False),
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
    """A secret that a reference names, one that another setting repeats, and one that the shell has
    expanded.
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


def test_settings_without_variables_are_shown_unchanged() -> None:
    composed = compose_overrides(["+recipe=tiny_cpu", "name=${data.path}"])
    assert as_plain(composed)["name"] == composed.data.path


def test_the_shown_command_line_of_a_run_contains_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOOL_KEY", VALUE)
    monkeypatch.setenv("SHORT_KEY", "1")
    labels = run_labels("r", overrides=[f"environment.args.key={VALUE}", "trainer.x=1"], seed=0)
    assert labels.overrides == ("environment.args.key=${oc.env:TOOL_KEY}", "trainer.x=1")
    assert VALUE not in f"{labels.name}{labels.group}"


def test_a_longer_word_that_contains_the_value_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOOR_PASSWORD", "sesame00")
    assert mask(["sesame00", "opensesame00"]) == ["${oc.env:DOOR_PASSWORD}", "opensesame00"]


def test_a_value_that_is_a_path_or_short_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when data.path becomes a reference because some variable has the same folder."""
    monkeypatch.setenv("AUTH_FOLDER", "/data/questions")
    monkeypatch.setenv("SITE_KEY", "auto")
    assert mask("data.path=/data/questions/a.jsonl mode=auto").startswith("data.path=/data")
    assert "oc.env" not in mask("mode=auto")


def test_an_error_that_names_a_forgotten_variable_says_how_to_pass_it() -> None:
    script = (
        "import os; from april_rl.config.secrets import forget_secrets; "
        "from april_rl.config.user_code import Caught; forget_secrets(['OTHER_KEY'])\n"
        "with Caught() as caught:\n    os.environ['SEARCH_KEY']\n"
        "print(caught.message, os.environ['OTHER_KEY'])"
    )
    variables = {**os.environ, "SEARCH_KEY": VALUE, "OTHER_KEY": "left"}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert "KeyError: 'SEARCH_KEY'" in ran.stdout
    assert "list it in user_code.secrets" in ran.stdout
    assert ran.stdout.strip().endswith("left")
