"""The configuration: recipes compose, mistakes are refused by name, and every setting is read."""

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import pytest
from composed_config import SECTIONS, load, refusal
from omegaconf import OmegaConf
from source_tree import PACKAGE, ROOT, package_files, tree_of

from april_rl.config import TrainConfig, config_dir
from april_rl.config.store import ConfigError, run_config


def settings() -> dict[str, object]:
    """Yield every key of the schema with its default."""
    defaults: dict[str, object] = {}
    for name, section in SECTIONS.items():
        if is_dataclass(section):
            defaults |= {
                f"{name}.{entry.name}": getattr(section(), entry.name) for entry in fields(section)
            }
        else:
            defaults[name] = getattr(TrainConfig(), name)
    return defaults


def test_a_recipe_selects_its_algorithm_and_the_command_line_takes_precedence() -> None:
    assert load("+recipe=qwen3_4b_dapo").algorithm.dynamic_sampling
    assert not load("+recipe=qwen3_4b_dapo", "algorithm=grpo").algorithm.dynamic_sampling
    assert load("+recipe=tiny_cpu", "rollout.group_size=4").rollout.group_size == 4


def test_the_frozen_keys_exist() -> None:
    frozen = """
        name seed deterministic model.path data.path optimizer.lr trainer.num_steps
        trainer.num_groups trainer.num_minibatches rollout.group_size
        rollout.over_sampling_factor rollout.refill rollout.max_staleness rollout.on_stale
        rollout.max_response_tokens rollout.temperature rollout.drain_steps learner.max_tokens
        learner.age_decay learner.max_mismatch learner.offload engine.tensor_parallel_size
        runtime.num_workers runtime.ray_address tracking.wandb
    """
    assert set(frozen.split()) <= settings().keys()


OUT_OF_RANGE = """
    algorithm.overlong_buffer_frac=1.1 algorithm.overlong_penalty=inf algorithm.clip_low=1
    algorithm.weight_bounds=[0,0.5] algorithm.weight_bounds=[0,inf] algorithm.dual_clip=1
    algorithm.entropy_coefficient=-0.1 algorithm.entropy_target=0 algorithm.opsm_threshold=0
    algorithm.weight_bounds=[0.5,2] algorithm.weight_bounds=[2] algorithm.geometric_mask=[0.5]
    algorithm.geometric_mask=[1.2,2] algorithm.geometric_mask=[0.5,inf]
    algorithm.geometric_mask=[nan,2] data.path= data.template=nothing
    engine.gpu_memory_utilization=1 engine.tensor_parallel_size=0 evaluation.every=0
    learner.age_decay=0 learner.shard_size=-1 learner.max_mismatch=0 learner.age_weight=nothing
    lora.rank=0 learner.shard_size=0 algorithm.reference_every=0 checkpoint.every_steps=0
    checkpoint.every_minutes=0 checkpoint.export_every_steps=0 trainer.max_hours=0
    evaluation.max_prompts=0 evaluation.max_response_tokens=0
    model.path= optimizer.lr=0 optimizer.betas=[0.9,1] optimizer.betas=[0.9]
    optimizer.lr=inf optimizer.weight_decay=nan optimizer.warmup_steps=100 reward.hard_timeout_s=1
    user_code.memory_gib=0.5 reward.hard_timeout_s=inf user_code.start_timeout_s=0
    rollout.over_sampling_factor=0.5 rollout.over_sampling_factor=inf
    rollout.over_sampling_factor=nan rollout.group_size=0
    rollout.group_size=1 rollout.max_staleness=-1 rollout.tick_steps=0 rollout.tick_steps=often
    rollout.temperature=0 rollout.temperature=inf rollout.drain_steps=100 runtime.num_workers=0
    seed=-1 seed=4294967296 tracking.save_samples_every=0 trainer.num_steps=0
    trainer.num_minibatches=1000 trainer.num_passes=0
"""


@pytest.mark.parametrize("override", [*OUT_OF_RANGE.split(), "evaluation.sets.held_out="])
def test_a_value_out_of_range_is_refused_in_one_line_that_starts_with_its_key(
    override: str,
) -> None:
    with pytest.raises(ConfigError) as caught:
        load("+recipe=tiny_cpu", override)
    message = str(caught.value)
    assert message.startswith(override.partition("=")[0])
    assert "\n" not in message


def test_an_error_about_evaluation_says_how_to_turn_it_off() -> None:
    with pytest.raises(
        ConfigError, match=r"every must be >= 1, got 0; evaluation\.sets\.NAME=null"
    ):
        load("+recipe=tiny_cpu", "evaluation.every=0")
    assert not load("+recipe=tiny_cpu", "evaluation.sets.held_out=null").evaluation.sets


def test_a_folder_without_a_run_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give the folder that holds config\.yaml"):
        run_config(tmp_path / "config.yaml")


def test_without_a_recipe_the_missing_setting_is_named_with_a_remedy() -> None:
    message = refusal("model.path=builtin:tiny")
    assert message.startswith("data.path is not set")
    assert "+recipe=NAME" in message
    assert "tiny_cpu" in message


def settings_in(path: Path) -> Iterator[tuple[str, object]]:
    """Return every key that a file of `configs/` sets, with its value; its folder is
    its section.
    """
    section = path.relative_to(config_dir()).parent.as_posix()
    tree = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(tree, dict)
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", given) for inner, given in value.items())
        else:
            yield (key if section == "." else f"{section}.{key}"), value


def test_configs_do_not_repeat_defaults_of_the_schema() -> None:
    defaults = {
        key: value.name if isinstance(value, Enum) else value for key, value in settings().items()
    }
    repeated = [
        f"{path.relative_to(ROOT)}: {key}={value}"
        for path in sorted(Path(config_dir()).rglob("*.yaml"))
        for key, value in settings_in(path)
        if key in defaults and defaults[key] == value
    ]
    assert repeated == []


class Reads(ast.NodeVisitor):
    """The settings that a module reads, through a whole configuration or a section of it.

    A whole configuration is a name or attribute `config`, or anything annotated with TrainConfig. A
    section is an attribute of it, a name to which such an attribute is assigned, or anything
    annotated with the section's class. Writes do not count.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.keys: set[str] = set()
        self._classes = {section.__name__: name for name, section in SECTIONS.items()}
        # For each variable: its section, or "" for a whole configuration.
        self._names: dict[str, str] = {}
        # Twice, because a call may reveal what an argument is after its use.
        for node in [*ast.walk(tree)] * 2:
            self._learn(node)
        self.visit(tree)

    def _learn(self, node: ast.AST) -> None:
        """Find out which names of the module are a configuration or a section."""
        if isinstance(node, ast.arg) and node.annotation is not None:
            self._visit_annotation(node.arg, node.annotation)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            for name in (node.target.id, f"self.{node.target.id}"):  # a variable, or a field
                self._visit_annotation(name, node.annotation)
        elif isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Tuple):
            self._visit_assignment(node.targets[0], node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else []
            for target, value in zip(node.targets[0].elts, values, strict=False):
                self._visit_assignment(target, value)

    def _visit_assignment(self, target: ast.expr, value: ast.expr) -> None:
        section = self._section(value)
        if section:
            self._names[ast.unparse(target)] = section

    def _visit_annotation(self, name: str, annotation: ast.expr) -> None:
        known = self._classes | {"TrainConfig": "", "PromptSetConfig": "data"}
        known["BackendSettings"] = ""  # it has one section
        if isinstance(annotation, ast.Name) and annotation.id in known:
            self._names[name] = known[annotation.id]

    def _is_config(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return self._names.get(node.id, node.id) in ("", "config")
        return isinstance(node, ast.Attribute) and node.attr.strip("_") == "config"

    def _section(self, node: ast.expr) -> str | None:
        """Return the section that an expression refers to."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        known = self._names.get(ast.unparse(node))
        if isinstance(node, ast.Name) or known:
            return known or None
        is_section = isinstance(node, ast.Attribute) and is_dataclass(SECTIONS.get(node.attr))
        return node.attr if is_section and self._is_config(node.value) else None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        section = self._section(node.value)
        if isinstance(node.ctx, ast.Load) and section:
            self.keys.add(f"{section}.{node.attr}")
        elif isinstance(node.ctx, ast.Load) and self._is_config(node.value):
            self.keys.add(node.attr)
        self.generic_visit(node)


def keys_read(source: str) -> set[str]:
    return Reads(ast.parse(source)).keys & settings().keys()


@pytest.mark.parametrize(
    "source",
    [
        "size = self.rollout.group_size",
        "size = rollout.group_size",
        "config.rollout.group_size = 3",
        "config.rollout.group_sizes",
        "collector = Collector(group_size=group_size)",
        "asdict(config.rollout)",
    ],
)
def test_a_setting_does_not_count_as_read_through_a_similar_name(source: str) -> None:
    assert keys_read(source) == set()


def test_every_setting_is_read_outside_the_configuration() -> None:
    outside = [path for path in package_files() if not path.is_relative_to(PACKAGE / "config")]
    read = set().union(*(Reads(tree_of(path)).keys for path in outside))
    assert sorted(settings().keys() - read) == []
