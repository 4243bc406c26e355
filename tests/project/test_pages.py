"""Pages that name many settings, and metrics, of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from source_tree import ROOT, package_files

from april_rl.commands import COMMANDS
from april_rl.config import to_config
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


PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/**/*.md")]
_COMPOSED = re.compile(
    r"\s*(?:\w+=\S+ )*python -m april_rl(?:\.train| train| rehearse| profile) (.*)"
)


def command_lines(path: Path) -> list[str]:
    """Lines of the page's code blocks without a language, or in bash, continued ones joined."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, flags=re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_the_settings_of_every_command_on_every_page_are_accepted() -> None:
    """Fails when a page has a recipe or setting that is gone, or a value that is refused. NAME
    stands for a recipe.
    """
    found = [
        match[1]
        for path in PAGES
        for line in command_lines(path)
        for match in _COMPOSED.finditer(line)
    ]
    assert len(found) > 30
    for line in found:
        words = shlex.split(line.replace("+recipe=NAME", "+recipe=tiny_cpu"), comments=True)
        given = [
            word for word in words if not word.startswith("-") and re.search(r"^\+|^~|=", word)
        ]
        to_config(compose_overrides(given))


def test_the_commands_tools_and_targets_on_every_page_exist() -> None:
    """Also those in sentences. Fails when one is renamed and a page is not. The page of experiments
    names tools of earlier commits.
    """
    pages = [path for path in PAGES if path.name != "experiments.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    assert {*re.findall(r"python -m april_rl (\w+)", text)} <= {"train", "COMMAND", *COMMANDS}
    tools = set(re.findall(r"python (tools/\w+\.py)", text))
    assert len(tools) > 5
    assert [tool for tool in tools if not (ROOT / tool).is_file()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`)make (\w+)", text, flags=re.M))
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
