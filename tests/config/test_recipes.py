"""Recipes: headers are correct, memory fits on the named GPUs, sweeps do what they say."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from composed_config import load
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from planned_models import HUB, PLANNED, sizes_of
from source_tree import ROOT

from april_rl.config import TrainConfig, config_dir, register
from april_rl.config.choices import Device
from april_rl.config.run_dir import CheckRunDir
from april_rl.config.store import recipes
from april_rl.config.task import MISSING
from april_rl.start.planning.engine_sleep import decide_sleep_and_resume
from april_rl.start.planning.layout import settle
from april_rl.start.planning.memory_check import Room, check_plan
from april_rl.start.planning.memory_inputs import Beside, memory_inputs
from april_rl.start.planning.memory_plan import GIB, MemoryPlan
from april_rl.start.planning.notes import inert_settings
from april_rl.training.runtime.layout import Layout

load = cache(load)
OURS = [name for name in PLANNED if not name.startswith("paper/")]
SWEEPS = sorted(path.stem for path in Path(config_dir(), "sweep").glob("*.yaml"))
SWEPT = "qwen3_4b_dapo"
_PLAN = re.compile(r"Memory plan(?: with ([^:]+))?: (rollout [^G]*) GiB of (\d+)\.")
_WORKERS = {"one": 1, "eight": 8}


def header(name: str) -> str:
    """Return the comment at the head of a recipe as one line."""
    lines = recipes()[name].read_text(encoding="utf-8").splitlines()
    head = [line.lstrip("# ") for line in lines if line.startswith("#")]
    return " ".join(head)


def settle_recipe(name: str, *overrides: str) -> tuple[TrainConfig, Layout]:
    """Return the recipe without auto values, and its layout on a machine with the GPUs that it
    names.
    """
    config = load(f"+recipe={name}", *overrides)
    workers = config.runtime.num_workers
    assert isinstance(workers, int)
    return settle(config, gpus=workers, where="this machine")


def planned(name: str, *overrides: str, gpu_gib: int) -> MemoryPlan:
    """Return the checked memory plan of the recipe on GPUs of this size."""
    config, layout = settle_recipe(name, *overrides)
    model = sizes_of(HUB[config.model.path], rank=config.lora.rank)
    room = Room(device=gpu_gib * GIB, free=0.98 * gpu_gib * GIB)
    teacher = config.teacher.path
    beside = Beside(teacher=sizes_of(HUB[teacher])) if teacher else Beside()
    decided = decide_sleep_and_resume(
        config, memory_inputs(config, layout, beside), model=model, room=room
    )
    return check_plan(model, decided.inputs, room)


@pytest.mark.parametrize("name", recipes())
def test_a_header_gives_the_command_the_hardware_and_the_expected_result(name: str) -> None:
    text = header(name)
    assert re.search(rf"python -m april_rl\.train \+recipe={re.escape(name)}(\s|$)", text)
    assert "Hardware: " in text
    assert "Expected: " in text


def test_every_recipe_is_in_the_table() -> None:
    table = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \[`([\w/]+)`\]\(([\w/.]+)\)", table, flags=re.MULTILINE)
    assert named == [(name, f"{name}.yaml") for name, _ in named]
    assert sorted(name for name, _ in named) == sorted(recipes())


@pytest.mark.parametrize("name", PLANNED)
def test_the_memory_plan_is_the_one_in_the_header_and_fits_its_gpus(name: str) -> None:
    """The first plan is for the hardware that the header names. Fails when a setting changes the
    memory and the header is not updated, or the plan does not fit.
    """
    config, _ = settle_recipe(name)
    plans = _PLAN.findall(header(name))
    hardware = re.search(r"Hardware: (one|eight) (\d+) GiB GPU", header(name))
    assert plans, "no memory plan"
    assert hardware, "no hardware"
    assert (_WORKERS[hardware[1]], hardware[2]) == (config.runtime.num_workers, plans[0][2])
    for overrides, stated, gib in plans:
        plan = planned(name, *overrides.split(), gpu_gib=int(gib))
        found = ", ".join(f"{phase.name} {phase.total / GIB:.1f}" for phase in plan.phases)
        assert stated == found, (overrides, gib)


@pytest.mark.parametrize("name", PLANNED)
def test_a_recipe_evaluates_and_asks_for_answers_in_one_form(name: str) -> None:
    """DAPO-Math's prompts already ask for a last line; the other data sets need an instruction.
    Fails when an evaluation asks for another form than the training.
    """
    config = load(f"+recipe={name}")
    assert config.evaluation.sets
    is_dapo = config.data.path.endswith("DAPO-Math-17k")
    asked = [config.data.instruction] if not is_dapo else []
    for chosen in config.evaluation.sets.values():
        own = chosen.instruction
        asked.append(config.data.instruction if own is None else own)
    wanted = "Answer: $Answer" if is_dapo else r"\boxed{}"
    assert all(wanted in instruction for instruction in asked)


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_composes_into_a_checked_configuration(name: str) -> None:
    config = load(f"+recipe={name}")
    assert config.name == name
    assert MISSING not in (config.model.path, config.data.path)


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_sets_nothing_that_its_device_ignores(name: str) -> None:
    config = load(f"+recipe={name}")
    device = "cpu" if config.runtime.device is Device.cpu else "cuda"
    lines = list(inert_settings(config, device=device))
    assert [line for line in lines if "has no effect on" in line] == []


def test_our_dapo_recipes_take_several_updates_per_batch() -> None:
    """Clip-higher is part of DAPO, and has no effect with one update per batch."""
    configs = {name: load(f"+recipe={name}") for name in OURS}
    dapo = {name: each for name, each in configs.items() if each.algorithm.dynamic_sampling}
    assert dapo
    inert = {name: list(inert_settings(each, device="cuda")) for name, each in dapo.items()}
    assert {name: lines for name, lines in inert.items() if lines} == {}


@pytest.mark.parametrize("name", [name for name in PLANNED if name.startswith("paper/")])
def test_the_papers_recipes_have_the_published_values(name: str) -> None:
    config = load(f"+recipe={name}")
    optimizer, rollout, algorithm = config.optimizer, config.rollout, config.algorithm
    assert (optimizer.lr, optimizer.betas) == (1e-6, [0.9, 0.98])
    assert (optimizer.weight_decay, optimizer.warmup_steps) == (0.1, 0)
    assert (config.trainer.num_groups, rollout.group_size) == (32, 8)
    assert config.trainer.num_minibatches == 1
    assert (rollout.temperature, rollout.over_sampling_factor, rollout.refill) == (0.8, 2.0, False)
    assert rollout.max_response_tokens == 16384
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.28)
    assert algorithm.aggregation.name == "sequence_mean"
    assert algorithm.correction.name == "none"
    assert (algorithm.loss == "gspo") == name.endswith("gspo")
    evaluation = config.evaluation
    assert (evaluation.every, evaluation.num_samples, evaluation.top_p) == (10, 16, 0.7)


@pytest.mark.parametrize(
    ("schedule", "factor"), [("synchronous", 1.0), ("april_paper", 2.0), ("mostly_fresh", 1.1)]
)
def test_a_schedule_changes_two_settings_of_any_recipe(schedule: str, factor: float) -> None:
    """A setting on the command line overrides the schedule."""
    for recipe in ("tiny_cpu", "qwen3_4b_dapo"):
        base, chosen = load(f"+recipe={recipe}"), load(f"+recipe={recipe}", f"+schedule={schedule}")
        found = chosen.rollout
        assert (found.over_sampling_factor, found.refill) == (factor, False)
        assert replace(base, rollout=found) == chosen
        own = load(f"+recipe={recipe}", f"+schedule={schedule}", "rollout.refill=true").rollout
        assert own == replace(found, refill=True)


@pytest.mark.parametrize("sweep", SWEEPS)
def test_every_run_of_a_sweep_is_a_checked_configuration(sweep: str) -> None:
    assert len([load(f"+recipe={SWEPT}", *overrides) for overrides in runs_of(sweep)]) > 1


@cache
def runs_of(sweep: str) -> list[list[str]]:
    """Return the overrides of each run, computed by Hydra's own sweeper."""
    register()
    chosen = [f"+recipe={SWEPT}", f"+sweep={sweep}"]
    with initialize_config_dir(config_dir(), version_base="1.3"):
        composed = compose("train", chosen, return_hydra_config=True)
    params = [f"{key}={values}" for key, values in composed.hydra.sweeper.params.items()]
    [runs] = BasicSweeper.split_arguments(
        OverridesParser.create().parse_overrides(params), max_batch_size=None
    )
    return runs


def test_the_sweep_over_alpha_has_the_synchronous_loop_and_every_factor_with_three_seeds() -> None:
    found = [load(f"+recipe={SWEPT}", *overrides) for overrides in runs_of("alpha")]
    assert [(each.seed, each.rollout.over_sampling_factor) for each in found] == [
        (seed, factor) for seed in (0, 1, 2) for factor in (1, 1.5, 2, 3)
    ]
    for each in found:
        assert each.rollout.refill == (each.rollout.over_sampling_factor != 1)


def test_a_sweep_without_multirun_is_refused_before_anything_is_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra itself would do a single run, with the recipe's own value."""
    register()
    chosen = ["+recipe=tiny_cpu", "+sweep=alpha", f"hydra.run.dir={tmp_path / 'run'}"]
    with initialize_config_dir(config_dir(), version_base="1.3"):
        composed = compose("train", chosen, return_hydra_config=True)
    with pytest.raises(SystemExit):
        CheckRunDir().on_run_start(composed)
    assert "several values of seed and rollout" in (said := capsys.readouterr().err)
    assert "--multirun" in said
    assert not (tmp_path / "run").exists()


def test_recipes_that_avoid_compiling_for_the_engine_avoid_it_for_the_learner() -> None:
    """Fails when the first minute on a GPU goes into compiling for a run of half a minute."""
    for name in recipes():
        config = load(f"+recipe={name}")
        if config.runtime.device.value == "gpu":
            assert (config.learner.fused is False) == (not config.engine.cuda_graphs), name
