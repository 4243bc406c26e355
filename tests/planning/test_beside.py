"""What is read of a teacher before a process starts, and its place in the memory plan."""

import json
import shutil
from pathlib import Path

import pytest
from composed_config import load
from planned_models import GPU, INPUTS, change, sizes_of
from tiny_models import write_tiny_qwen3
from transformers import AutoConfig

from april_rl.planning.beside import read_beside
from april_rl.planning.errors import PreflightError
from april_rl.planning.memory_inputs import Beside
from april_rl.planning.memory_plan import plan_memory
from april_rl.tiny.builtins import resolve_builtins


def beside(teacher: Path | str, *overrides: str) -> Beside:
    config = load("+recipe=tiny_cpu", f"teacher.path={teacher}", *overrides)
    resolve_builtins(config)
    return read_beside(config, AutoConfig.from_pretrained(config.model.path))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the tiny policy, to be changed."""
    config = load("+recipe=tiny_cpu")
    resolve_builtins(config)
    shutil.copytree(config.model.path, tmp_path / "teacher")
    return tmp_path / "teacher"


def test_a_teacher_has_sizes_of_its_own(copy):
    assert beside("").teacher is None
    found = beside("builtin:tiny_teacher").teacher
    assert found is not None
    assert found == beside(copy).teacher


def test_a_teacher_with_another_tokenizer_is_refused(copy, tmp_path):
    """Fails when the policy's token numbers would be scored as other texts."""
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


def test_a_teacher_that_reads_too_little_or_is_no_model_is_refused(copy, tmp_path):
    with pytest.raises(PreflightError, match=r"^teacher\.path=.* does not exist"):
        beside(tmp_path / "missing")
    path = copy / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": 200}))
    with pytest.raises(PreflightError, match=r"reads 200 tokens, and .* = 352"):
        beside(copy)
    path.write_text(json.dumps(config | {"vocab_size": 10}))
    with pytest.raises(PreflightError, match="has 10 tokens and the policy"):
        beside(copy)


def test_a_teacher_is_in_host_memory_and_on_the_gpu_in_a_phase_of_its_own():
    """An 8B beside a 1.7B. Fails when its weights are counted in another phase, or not sharded."""
    policy, teacher = sizes_of("1.7B"), sizes_of("8B")
    without = plan_memory(policy, INPUTS, device_bytes=GPU)
    found = plan_memory(policy, change(INPUTS, beside=Beside(teacher)), device_bytes=GPU)
    assert [phase.name for phase in found.phases if phase not in without.phases] == ["teacher"]
    share = 2 * teacher.num_parameters / 8
    [phase] = [phase for phase in found.phases if phase.name == "teacher"]
    assert phase.items["teacher"] == found.host.items["teacher"] == share
    assert found.host.total == without.host.total + share
    assert "gradients" not in phase.items
