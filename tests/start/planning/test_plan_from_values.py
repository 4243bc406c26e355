"""A plan and its refusals from facts that are written by hand; nothing is read or started."""

import subprocess
import sys
from dataclasses import replace

import pytest
from composed_config import load
from planned_models import GPU, sizes_of, worker
from test_plan import GPUS

from april_rl.config.choices import Sleep
from april_rl.errors import PreflightError
from april_rl.start.planning.facts import Facts, ModelFacts, Models
from april_rl.start.planning.memory_inputs import Beside
from april_rl.start.planning.plan import draft_training, plan_training, policy_line
from april_rl.start.planning.sizes import num_slots, tick_steps

MODEL = ModelFacts(
    path="policy", model_type="qwen3", context_tokens=32768, num_heads=32, vocab_size=151936
)
FACTS = Facts(machine=replace(GPUS, num_cores=64), policy=MODEL)
RECIPE = ("+recipe=qwen3_4b_dapo", "model.path=policy", "data.path=rows.jsonl")


def test_a_plan_is_a_function_of_values() -> None:
    """Fails when a plan reads a file, or a number of two rooms is not a field of it."""
    draft = draft_training(load(*RECIPE), FACTS)
    models = Models(policy=sizes_of("4B"), beside=Beside())
    plan = plan_training(draft, models, [worker("node", free=GPU)] * 8)
    rollout, trainer = plan.config.rollout, plan.config.trainer
    slots = round(rollout.over_sampling_factor * trainer.num_groups * rollout.group_size)
    assert plan.sizes.num_slots == slots
    assert plan.sizes.max_num_seqs * plan.layout.num_engines >= slots
    assert plan.config.engine.sleep in (Sleep.always, Sleep.never)
    assert plan == plan_training(draft, models, [worker("node", free=GPU)] * 8)


def test_all_that_is_wrong_is_in_one_message() -> None:
    """The message names what is wrong with the machine, the policy and a critic."""
    small = replace(MODEL, context_tokens=64)
    facts = replace(FACTS, policy=small, critic=replace(small, path="policy"))
    facts = replace(facts, machine=replace(FACTS.machine, engines=frozenset(), free_bytes=1))
    with pytest.raises(PreflightError) as caught:
        draft_training(load(*RECIPE), facts)
    for part in ("no vLLM is installed", "batch: ", "context length: ", "critic.path: the model"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("rank", "trained"), [(None, ""), (16, ", 33 million trained")])
def test_the_start_shows_total_and_trained_parameters(rank, trained) -> None:
    assert policy_line(sizes_of("4B", rank=rank)) == f"policy: 4022.5 million parameters{trained}"


def test_as_many_samples_are_in_flight_as_the_factor_says() -> None:
    size = ("trainer.num_groups=4", "rollout.group_size=4", "rollout.over_sampling_factor=1.3")
    assert num_slots(load("+recipe=tiny_cpu", *size)) == 21


def test_ticks_are_longer_with_hundreds_of_engines_unless_their_length_is_set() -> None:
    """Fails when auto ignores engines, budget or turns, or overrides a number."""
    large = ("rollout.max_response_tokens=4096", "learner.max_tokens=5000")
    auto = load("+recipe=tiny_cpu", "rollout.tick_steps=auto", *large)
    steps = [tick_steps(auto, num_engines=number) for number in (1, 8, 64, 128, 512, 10_000)]
    assert steps == [32, 32, 32, 32, 64, 64]
    turns = load("+recipe=tiny_tools_cpu", "rollout.tick_steps=auto", *large)
    assert tick_steps(turns, num_engines=8) == 8
    short = load("+recipe=tiny_cpu", "rollout.tick_steps=auto", "rollout.max_response_tokens=256")
    assert tick_steps(short, num_engines=512) == 8
    assert tick_steps(load("+recipe=tiny_cpu", "rollout.tick_steps=3"), num_engines=512) == 3


def test_planning_imports_neither_torch_nor_ray() -> None:
    code = "import april_rl.start.planning.plan, sys; print({'torch', 'ray'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
