"""Pages that name many settings and metrics of the code."""

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from metric_keys import undescribed_keys
from source_tree import ROOT, package_files
from word_tokenizer import hf_tokenizer

from april_rl.config import to_config
from april_rl.config.prompt_sets import evaluation_set, training_sets
from april_rl.config.store import compose_overrides, register_folder
from april_rl.config.task import PromptSetConfig
from april_rl.run.tracking.figures import HEADING
from april_rl.start.commands import COMMANDS
from april_rl.task.data.prompts import load_prompts
from april_rl.task.data.tokenizer import Tokenizer


def unknown_settings(text: str) -> set[str]:
    """Return words in backticks that have the form section.key and are not settings, without
    Hydra's own.
    """
    config = compose_overrides(["+recipe=tiny_cpu"])
    keys = {tuple(key.split(".")) for key in re.findall(r"`([a-z]+\.[a-z_]+)", text)}
    files = {"md", "html", "txt", "yaml", "jsonl"}
    return {
        f"{section}.{key}"
        for section, key in keys
        if section != "hydra"
        and key not in files
        and (section not in config or key not in config[section])
    }


def test_settings_in_the_first_column_for_newcomers_exist() -> None:
    lines = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8").splitlines()
    first = " ".join(line.split("|")[1] for line in lines if line.startswith("| "))
    assert len(re.findall(r"`[a-z]+\.[a-z_]+", first)) > 30
    assert unknown_settings(first) == set()


def test_settings_and_metrics_on_the_troubleshooting_page_exist() -> None:
    text = (ROOT / "docs" / "trouble.md").read_text(encoding="utf-8")
    assert unknown_settings(text) == set()
    metrics = set(re.findall(r"`([a-z]+/[a-z_]+)`", text))
    assert len(metrics) > 8
    assert undescribed_keys(metrics) == []


def test_the_checklist_for_gpus_has_the_lines_that_a_run_prints() -> None:
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


PAGES = [page for of in ("README*.md", "docs/**/*.md", "recipes/**/*.md") for page in ROOT.glob(of)]
_COMPOSED = re.compile(
    r"\s*(?:\w+=\S+ )*python -m april_rl(?:\.train| train| rehearse| profile| data| evaluate) (.*)"
)
_PATTERN = "data.answer_pattern="
# These are not settings of a run.
_OF_COMMANDS = ("write=", "output=", "against=", "temperature=", "calibration=")


def command_lines(path: Path) -> list[str]:
    """Return lines of the page's code blocks without a language, or in bash, with continued ones
    joined.
    """
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, flags=re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_no_row_of_a_table_is_longer_than_a_screen() -> None:
    lines = [(page.name, line) for page in PAGES for line in page.read_text("utf-8").splitlines()]
    assert [(page, line) for page, line in lines if line[:1] == "|" and len(line) > 200] == []


def test_the_code_of_every_page_imports_from_the_api_alone() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    code = "".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
    assert set(re.findall(r"(?:from|import) (april_rl[.\w]*)", code)) == {"april_rl.api"}


@pytest.mark.slow
def test_the_settings_of_every_command_on_every_page_are_accepted() -> None:
    """Fails when a page names a recipe or setting that no longer exists, or a value that is
    refused. NAME stands for a recipe.
    """
    found = {
        tuple(settings_of(match[1]))
        for path in PAGES
        for line in command_lines(path)
        for match in _COMPOSED.finditer(line)
        if "--config-dir" not in line
    }
    assert len(found) > 20
    for settings in sorted(found):
        to_config(compose_overrides(settings))


def test_the_recipe_and_the_reward_of_the_page_of_recipes_are_right(tmp_path: Path) -> None:
    """Fails when the recipe names a setting that no longer exists, or keeps a data set of its
    parent.
    """
    page = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.S)
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "of_first_page.yaml").write_text(recipe, encoding="utf-8")
    register_folder(tmp_path)
    config = to_config(compose_overrides(["+recipe=of_first_page"]))
    assert (config.data.path, [*config.evaluation.sets]) == ("train.jsonl", ["test"])
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["boxed"](["", ""], ["so \\boxed{3}", "3"], ["3", "3"]) == [1.0, 0.0]


def settings_of(line: str) -> list[str]:
    """Return the settings on a command line, with a data set and a model if it lacks them."""
    words = shlex.split(line.replace("+recipe=NAME", "+recipe=tiny_cpu"), comments=True)
    given = [word for word in words if not word.startswith("-") and re.search(r"^\+|^~|=", word)]
    given = [word for word in given if not word.startswith(_OF_COMMANDS)]
    text = " ".join(given)
    needed = {"data.path=": "x.jsonl", "model.path=": "x"}
    is_whole = "recipe=" in text
    return given + [f"{k}{v}" for k, v in needed.items() if not is_whole and k not in text]


def test_the_settings_in_sentences_of_every_page_are_accepted() -> None:
    """These are settings in backticks with a value, composed together where their keys differ."""
    sections = "|".join(compose_overrides(["+recipe=tiny_cpu"]).keys())
    setting = re.compile(rf"['+~]*(?:{sections})\.[\w.]+=")
    # Error messages also begin with a setting, and continue with words.
    found = {
        line
        for path in PAGES
        for line in quoted(path)
        if setting.match(line) and all("=" in word for word in shlex.split(line))
    }
    assert len(found) > 30
    batches: list[dict[str, str]] = []
    for words in sorted(map(shlex.split, found)):
        own = {word.lstrip("+~").partition("=")[0]: word for word in words}
        fitting = (batch for batch in batches if not any(map(partial(overlap, own), batch)))
        batch = next(fitting, None)
        if batch is None:
            batches.append(batch := {})
        batch |= own
    for batch in batches:
        compose_overrides(["+recipe=tiny_cpu", *batch.values()])


def overlap(keys: Iterable[str], other: str) -> bool:
    """Return whether one of the keys equals `other`, contains it, or is inside it."""
    pairs = ((f"{key}.", f"{other}.") for key in keys)
    return any(one.startswith(two) or two.startswith(one) for one, two in pairs)


def test_every_data_command_on_a_page_reads_its_rows(tmp_path: Path) -> None:
    """With three rows that have the columns which the command names. Fails when a page doubles a
    backslash.
    """
    lines = {
        match[1]
        for path in PAGES
        for line in [*command_lines(path), f"python -m april_rl data {_alone(path)}"]
        for match in _COMPOSED.finditer(line)
        if "_column=" in line or "_pattern=" in line or "_column:" in line
    }
    assert len(lines) > 4
    for line in lines:
        config = to_config(compose_overrides(settings_of(line)))
        sets = [*training_sets(config.data).values()]
        sets += [evaluation_set(config.data, chosen) for chosen in config.evaluation.sets.values()]
        for chosen in sets:
            assert answers_read(chosen, tmp_path / "rows.jsonl") == ["1", "2", "3"], line


def quoted(path: Path) -> list[str]:
    """Return the words in backticks in the sentences of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", text)


def _alone(path: Path) -> str:
    """Return the settings in sentences of a page that say how answers are read."""
    return " ".join(line for line in quoted(path) if line.strip("'").startswith(_PATTERN))


def answers_read(chosen: PromptSetConfig, path: Path) -> list[str]:
    """Return the answers that these settings read from three rows."""
    rows = []
    for number in range(1, 4):
        row: dict[str, object] = {}
        gold = f"So it is\n#### {number}" if chosen.answer_pattern else str(number)
        for column, value in ((chosen.prompt_column, "one"), (chosen.answer_column, gold)):
            *outer, last = column.split(".")
            at: Any = row
            for name in outer:
                at = at.setdefault(name, {})
            at[last] = value
        rows.append(json.dumps(row) + "\n")
    path.write_text("".join(rows), encoding="utf-8")
    plain = replace(
        chosen,
        path=str(path),
        template="{prompt}",
        system_prompt=None,
        chat_template_kwargs={},
        args={},
    )
    tokenizer = Tokenizer(hf_tokenizer(), path="words")
    table = load_prompts(plain, tokenizer, key="data.path", max_prompt_tokens=999)
    return [prompt.answer for prompt in table]


def test_the_commands_recipes_tools_and_targets_on_every_page_exist() -> None:
    """Also in sentences. Fails when one is renamed and a page is not."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert {*re.findall(r"python -m april_rl (\w+)", text)} <= {"train", "COMMAND", *COMMANDS}
    for key, folder in (("recipe", ROOT / "recipes"), ("sweep", ROOT / "configs" / "sweep")):
        chosen = set(re.findall(rf"\+{key}=([\w/]+)", text)) - {"NAME", "mine"}  # a user's
        assert [name for name in chosen if not (folder / f"{name}.yaml").is_file()] == []
    tools = set(re.findall(r"python (tools/\w+\.py)", text))
    assert len(tools) > 5
    assert [tool for tool in tools if not (ROOT / tool).is_file()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`)make (\w+)", text, flags=re.M))
    assert targets >= {"train", "test"}
    assert [target for target in targets if f"\n{target}:" not in makefile] == []


def test_the_badges_of_the_readme_are_true(request: pytest.FixtureRequest) -> None:
    """The number of tests is compared where all of them run."""
    badges = re.findall("`([^`]+)`", (ROOT / "README.md").read_text("utf-8").split("\n\n")[1])
    licence, python, tests, models = badges
    setup = (ROOT / "setup.cfg").read_text("utf-8")
    assert f"license = {licence.removeprefix('licence ')}\n" in setup
    assert f"python_requires = >={re.findall(r'[0-9.]+', python)[0]}\n" in setup
    assert f"found right for {models.partition(' ')[0]} kinds of model" in " ".join(
        (ROOT / "docs" / "models.md").read_text("utf-8").split()
    )
    num_tests, collected = int(tests.replace(",", "").split()[0]), request.session.testscollected
    assert collected < 4_000 or abs(num_tests - collected) < 0.05 * collected
