"""A user's own recipes: in any folder (`--config-dir`), and without an evaluation set of their
parent.
"""

import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from printed_error import refused_training

from april_rl.__main__ import main as command
from april_rl.api import evaluate, train
from april_rl.config import TrainConfig
from april_rl.config.store import (
    NAMED_BY_USERS,
    as_plain,
    compose_overrides,
    register_folder,
    run_config,
    to_config,
)
from april_rl.errors import RunError
from april_rl.run.tracking.tracker import config_text
from april_rl.start.command_line import main


def write_recipe(folder: Path, name: str, text: str) -> None:
    path = folder / "recipe" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def print_config(words: list[str], capsys, monkeypatch) -> DictConfig:
    """Return the output of `--cfg job`."""
    monkeypatch.setattr(sys, "argv", ["april_rl.train", *words, "--cfg", "job"])
    main()
    config = OmegaConf.create(capsys.readouterr().out)
    assert isinstance(config, DictConfig)
    return config


def test_a_recipe_in_the_users_folder_needs_no_header_and_may_choose_an_algorithm(
    tmp_path, capsys, monkeypatch
):
    write_recipe(
        tmp_path,
        "team/mine_1",
        "defaults:\n  - override /algorithm: dapo\nname: my_model\n"
        "model: {path: /models/mine}\ndata: {path: /data/train.jsonl}\n"
        "rollout: {over_sampling_factor: 2.0}\n",
    )
    folder = f"--config-dir={tmp_path}"
    config = print_config([folder, "+recipe=team/mine_1", "seed=5"], capsys, monkeypatch)
    assert (config.name, config.algorithm.clip_high, config.seed) == ("my_model", 0.28, 5)
    assert config.rollout.over_sampling_factor == 2.0


def test_a_users_recipe_inherits_and_can_leave_out_an_evaluation_set(tmp_path, capsys, monkeypatch):
    write_recipe(
        tmp_path,
        "mine_2",
        "defaults: [tiny_cpu]\nname: mine\n"
        "evaluation: {sets: {held_out: null, test: {path: builtin:arithmetic_held_out}}}\n",
    )
    folder = ["--config-dir", str(tmp_path)]
    config = print_config([*folder, "+recipe=mine_2"], capsys, monkeypatch)
    assert list(to_config(config).evaluation.sets) == ["test"]


@pytest.mark.parametrize("removed", ["evaluation.sets.held_out", "reward.functions.right"])
def test_the_saved_settings_of_a_run_can_be_read_when_null_removed_a_set(
    tmp_path: Path, removed
) -> None:
    composed = compose_overrides(["recipe=tiny_cpu", f"++{removed}=null"])
    (tmp_path / "config.yaml").write_text(config_text(as_plain(composed)))
    assert run_config(tmp_path / "config.yaml") == to_config(composed)


PARENT = """defaults: [tiny_cpu]
data: {path: "reasoning_gym:a", args: {x: 1}, sampler: pass_rate, sampler_args: {x: 1},
  chat_template_kwargs: {x: 1}}
reward: {functions: {right: {function: exact, args: {x: 1}}}}
algorithm: {loss: "mine:loss", args: {x: 1}}
evaluation: {sets: {held_out: {path: "reasoning_gym:b", args: {x: 1}}}}
"""


@pytest.mark.parametrize(
    "key",
    [
        *("data.args", "algorithm.args", "reward.functions.right.args"),
        *("reward.functions", "evaluation.sets"),
    ],
)
def test_null_removes_what_a_mapping_inherits(tmp_path: Path, key: str) -> None:
    """In a recipe and on the command line, also before new entries, and in the saved settings."""
    write_recipe(tmp_path, "parent", PARENT)
    heir = OmegaConf.create({"defaults": ["parent"]})
    OmegaConf.update(heir, key, None)
    write_recipe(tmp_path, "heir", OmegaConf.to_yaml(heir))
    register_folder(tmp_path)
    assert OmegaConf.select(OmegaConf.structured(load("parent")), key)
    for words in (["heir"], ["parent", f"{key}=null"]):
        config = load(*words)
        assert not OmegaConf.select(OmegaConf.structured(config), key)
        (tmp_path / "config.yaml").write_text(config_text(as_plain(compose(*words))))
        assert run_config(tmp_path / "config.yaml") == config
        new = "{path: a.jsonl}" if key in NAMED_BY_USERS else "2"
        found = OmegaConf.select(compose(*words, f"{key}.y={new}"), key)
        assert found == OmegaConf.select(compose(*words, f"{key}={{y: {new}}}"), key)
        assert list(found) == ["y"]


def compose(recipe: str, *words: str) -> DictConfig:
    return compose_overrides([f"recipe={recipe}", *words])


def load(recipe: str, *words: str) -> TrainConfig:
    return to_config(compose(recipe, *words))


@pytest.mark.parametrize(
    ("words", "key", "rows"),
    [
        (["data.path=a.jsonl"], "data", "data.path=a.jsonl"),
        (["data.path=''", "data.sources.a={path: a.jsonl}"], "data", "data.sources"),
        (["data.path=''", "data.args=null", "data.sources.a={path: a/b, args: {x: 1}}"],
         "data.sources.a", "data.sources.a.path=a/b"),
        (["evaluation.sets.held_out.path=a.jsonl"], "evaluation.sets.held_out",
         "evaluation.sets.held_out.path=a.jsonl"),
    ],
)  # fmt: skip
def test_rows_that_take_no_inherited_args_are_refused_with_the_way_out(
    words: list[str], key: str, rows: str
) -> None:
    held_out = "evaluation.sets.held_out={path: 'reasoning_gym:b', args: {x: 1}}"
    with pytest.raises(RunError) as caught:
        load("smollm2_135m_cpu", held_out, *words)
    assert f"{key}.args=" in str(caught.value)
    assert f"has no effect with {rows}: " in str(caught.value)
    load("smollm2_135m_cpu", held_out, *words, f"{key}.args=null")


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("tiny_tools_cpu", "environment.function"),
        ("tiny_cpu", "data.instruction"),
        ("tiny_cpu", "data.answer_pattern"),
    ],
)
def test_null_clears_a_text_of_the_recipe(tmp_path: Path, recipe, key) -> None:
    """Also in the settings that the run saves."""
    others = ["environment.command=play"] if key.startswith("environment") else []
    composed = compose_overrides([f"recipe={recipe}", f"{key}=null", *others])
    config = to_config(composed)
    section, _, name = key.rpartition(".")
    assert getattr(getattr(config, section), name) is None
    (tmp_path / "config.yaml").write_text(config_text(as_plain(composed)))
    assert run_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tiny_cpu", "seed: 1", "tiny_cpu.yaml: there is a recipe/tiny_cpu already"),
        ("broken", "seed: [1", "broken.yaml:1: not valid YAML: expected"),
        ("typo", "trainer: {num_step: 3}", "recipe/typo: trainer.num_step is not a setting; did"),
        (
            "kind",
            "trainer: {num_steps: abc}",
            "recipe/kind: trainer.num_steps must be a whole number, got abc\n",
        ),
        ("list", "[a, b]", "recipe/list.yaml must have settings, KEY: VALUE on each line"),
        ("empty", "", "recipe/empty.yaml must have settings, KEY: VALUE on each line"),
        (
            "part",
            "trainer: [1, 2]",
            "recipe/part.yaml: trainer must be a section: set trainer.num_s",
        ),
        (
            "one",
            "model: mine",
            "recipe/one.yaml: model must be a section: set model.path, ..., got",
        ),
        ("sets", "evaluation: {sets: [a]}", "evaluation.sets must be a mapping such as {name: val"),
        ("entry", "evaluation: {sets: {a: b}}", "evaluation.sets.a must be a section: set evalua"),
        ("steps", "profiler: {steps: {a: 1}}", "profiler.steps must be a list in brackets, each"),
        (
            "slash",
            "defaults: [override algorithm: dapo]",
            "recipe/slash: write `override /algorithm",
        ),
        ("parent", "defaults: [tiny_cpuu]", "recipe/parent: there is no recipe tiny_cpuu; did"),
    ],
)
def test_an_error_in_a_recipe_names_its_file(
    tmp_path: Path, capsys, monkeypatch, name, text, message
):
    write_recipe(tmp_path, name, text)
    words = [f"--config-dir={tmp_path}", f"+recipe={name}", f"hydra.run.dir={tmp_path / 'run'}"]
    assert message in refused_training(words, capsys, monkeypatch)


def test_a_file_that_cannot_be_read_stops_only_the_runs_that_name_it(tmp_path, capsys, monkeypatch):
    write_recipe(tmp_path, "torn", "seed: [1")
    write_recipe(tmp_path, "heir", "defaults: [torn]\n")
    write_recipe(tmp_path, "whole", "defaults: [tiny_cpu]\nseed: 7\n")
    folder = f"--config-dir={tmp_path}"
    assert print_config([folder, "+recipe=whole"], capsys, monkeypatch).seed == 7
    message = refused_training([folder, "+recipe=heir"], capsys, monkeypatch)
    assert "/recipe/torn.yaml:1: not valid YAML: " in message
    write_recipe(tmp_path, "torn", "defaults: [tiny_cpu]\nseed: 8\n")
    assert print_config([folder, "+recipe=heir"], capsys, monkeypatch).seed == 8


def test_a_recipe_outside_the_folder_of_recipes_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "astray.yaml").write_text("defaults: [tiny_cpu]\n")
    words = [f"--config-dir={tmp_path}", "+recipe=astray"]
    assert refused_training(words, capsys, monkeypatch) == (
        f"{tmp_path}/astray.yaml is not a recipe: move it to {tmp_path}/recipe/astray.yaml\n"
    )


def test_a_missing_folder_is_named(capsys, monkeypatch):
    words = ["--config-dir", "nowhere", "seed=1"]
    message = "--config-dir nowhere is not a folder\n"
    assert refused_training(words, capsys, monkeypatch) == message


def test_other_commands_and_python_read_the_users_folder_too(tmp_path, capsys):
    """Fails when a model that was trained with a user's recipe cannot be evaluated with it."""
    write_recipe(tmp_path, "mine_3", "defaults: [tiny_cpu]\nseed: -1\n")
    for name in ("evaluate", "rehearse", "data", "profile"):
        assert command([name, "--config-dir", str(tmp_path), "+recipe=mine_3"]) == 1
        assert "seed must be in" in capsys.readouterr().err, name
    for run in (train, evaluate):
        with pytest.raises(RunError, match="seed must be in"):
            run("mine_3", config_dir=tmp_path)
