"""Facts about a teacher are read before a process starts, and the memory plan counts it."""

import json
import shutil
from pathlib import Path

import pytest
from composed_config import load
from learner_setup import group_of_one, make_actor_critic
from planned_models import CONFIGS, GPU, INPUTS, change, sizes_of
from tiny_models import write_tiny_qwen3
from transformers import AutoConfig

from april_rl.config.choices import Offload
from april_rl.config.models_beside import CriticConfig
from april_rl.errors import PreflightError
from april_rl.start.planning.facts import critic_sizes, read_facts
from april_rl.start.planning.machine import this_machine
from april_rl.start.planning.memory_inputs import Beside
from april_rl.start.planning.memory_plan import plan_memory
from april_rl.start.planning.plan import draft_training, models_of
from april_rl.task.tiny.builtins import resolve_builtins


def beside(teacher: Path | str, *overrides: str) -> Beside:
    config = resolve_builtins(load("+recipe=tiny_cpu", f"teacher.path={teacher}", *overrides))
    draft = draft_training(config, read_facts(config, this_machine(), trains=True))
    return models_of(draft, trains=True).beside


def test_builtin_paths_are_replaced_in_a_new_configuration():
    asked = load("+recipe=tiny_cpu", "teacher.path=builtin:tiny_teacher")
    found = resolve_builtins(asked)
    assert asked == load("+recipe=tiny_cpu", "teacher.path=builtin:tiny_teacher")
    paths = (found.model.path, found.teacher.path, found.data.path)
    assert all(Path(path).is_absolute() for path in paths)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the tiny policy, for changes."""
    config = resolve_builtins(load("+recipe=tiny_cpu"))
    shutil.copytree(config.model.path, tmp_path / "teacher")
    return tmp_path / "teacher"


def test_a_teacher_has_its_own_sizes(copy):
    assert beside("null").teacher is None
    found = beside("builtin:tiny_teacher").teacher
    assert found is not None
    assert found == beside(copy).teacher


def test_a_teacher_with_another_tokenizer_is_refused(copy, tmp_path):
    """Fails when the policy's token ids would be scored as other texts."""
    write_tiny_qwen3(tmp_path / "other")
    with pytest.raises(PreflightError, match=r"another tokenizer than model\.path"):
        beside(tmp_path / "other")
    path = copy / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [*vocabulary][5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(PreflightError, match=rf"token \d+, '{first}', is \d+ there"):
        beside(copy)
    own = load("+recipe=tiny_cpu", "algorithm.advantage=gae", f"critic.path={copy}")
    config = resolve_builtins(own)
    with pytest.raises(PreflightError, match=rf"critic\.path={copy} has another tokenizer"):
        draft_training(config, read_facts(config, this_machine(), trains=True))


def test_a_teacher_with_a_short_context_or_without_a_model_is_refused(copy, tmp_path):
    with pytest.raises(PreflightError, match=r"^teacher\.path=.* does not exist"):
        beside(tmp_path / "missing")
    path = copy / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": 200}))
    with pytest.raises(PreflightError, match=r"model reads at most 200 tokens, and .* = 352"):
        beside(copy)
    path.write_text(json.dumps(config | {"vocab_size": 10}))
    with pytest.raises(PreflightError, match="has a vocabulary of 10 tokens, and the policy"):
        beside(copy)


def test_a_teacher_is_in_host_memory_and_on_the_gpu_in_its_own_phase():
    """An 8B teacher for a 1.7B policy. Fails when its weights are counted in another phase, or not
    sharded.
    """
    policy, teacher = sizes_of("1.7B"), sizes_of("8B")
    without = plan_memory(policy, INPUTS, device_bytes=GPU)
    found = plan_memory(policy, change(INPUTS, beside=Beside(teacher)), device_bytes=GPU)
    assert [phase.name for phase in found.phases if phase not in without.phases] == ["teacher"]
    share = 2 * teacher.num_parameters / 8
    [phase] = [phase for phase in found.phases if phase.name == "teacher"]
    assert phase.items["teacher"] == found.host.items["teacher"] == share
    assert found.host.total == without.host.total + share
    assert "gradients" not in phase.items


def test_a_critic_is_a_second_trained_model_with_its_own_phase():
    """Fails when its optimizer state is missing in a phase, or its head counts like a
    vocabulary.
    """
    policy = sizes_of("1.7B")
    critic = critic_sizes(CONFIGS["8B"])
    assert critic.num_parameters == sizes_of("8B").num_parameters - 151936 * 4096
    without = plan_memory(policy, INPUTS, device_bytes=GPU)
    found = plan_memory(policy, change(INPUTS, beside=Beside(critic=critic)), device_bytes=GPU)
    share = critic.num_parameters / 8
    by_name = {phase.name: phase for phase in found.phases}
    for phase in without.phases:
        assert by_name[phase.name].total == pytest.approx(phase.total + 12 * share)
    own = by_name["critic"]
    assert own.items["policy"] == 12 * policy.num_parameters / 8
    weights = ("master weights", "optimizer state", "gradients")
    assert sum(own.items[name] for name in weights) == 16 * share
    assert found.host.total == without.host.total + 12 * share
    away = change(INPUTS, beside=Beside(critic=critic), offload=Offload.all)
    [rollout, *_] = plan_memory(policy, away, device_bytes=GPU).phases
    assert "critic" not in rollout.items or rollout.items["critic"] == 0


def test_teacher_reference_and_critic_are_each_in_host_memory_once():
    """Fails when the critic's share counts the teacher or the reference again."""
    policy, teacher = sizes_of("1.7B"), sizes_of("8B")
    critic = critic_sizes(CONFIGS["8B"])
    inputs = change(INPUTS, has_reference=True, beside=Beside(teacher, critic))
    host = plan_memory(policy, inputs, device_bytes=GPU).host
    assert host.items["critic"] == 12 * critic.num_parameters / 8
    assert host.items["teacher"] == 2 * teacher.num_parameters / 8
    assert host.items["reference"] == 2 * policy.num_parameters / 8


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_the_sizes_of_a_critic_match_the_model_that_is_built(tmp_path, tied):
    """Fails when a vocabulary-sized head is counted, or the embedding counts as tied."""
    write_tiny_qwen3(tmp_path, tied=tied)
    sizes = critic_sizes(AutoConfig.from_pretrained(tmp_path))
    with group_of_one():
        learner = make_actor_critic(str(tmp_path), critic=CriticConfig())
    model = learner.critic.trained.model
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert sizes.num_parameters == num_parameters - model.lm_head.weight.numel()
    assert sizes.embedding_unit == model.model.embed_tokens.weight.numel()
