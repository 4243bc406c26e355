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
from april_rl.start.planning.plan import draft_training, plan_training

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


def test_planning_imports_neither_torch_nor_ray() -> None:
    code = "import april_rl.start.planning.plan, sys; print({'torch', 'ray'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
