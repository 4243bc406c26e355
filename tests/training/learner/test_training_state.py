"""A restored learner continues as if it had never stopped, on any number of ranks."""

import json
import os
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import one_of, run_ranks
from learner_setup import (
    ALGORITHM,
    group_of_one,
    make_actor_critic,
    make_examples,
    make_learner,
    num_tokens,
    pack,
    write_model,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from april_rl.config.choices import Kl, Offload, Schedule
from april_rl.config.lora import LoraConfig
from april_rl.config.models_beside import CriticConfig
from april_rl.run.checkpointing.columns import write_state
from april_rl.training.learner.critic import ActorCritic
from april_rl.training.learner.learner import Learner
from april_rl.training.learner.training_state import TrainingStateError

# The entropy is always below the target.
TARGETED = replace(ALGORITHM, entropy_target=10.0, entropy_coefficient=2.0)
CRITIC = CriticConfig(lr=1e-2)
VARIANTS = {
    "adamw": {},
    "offloaded": {"offload": Offload.all},
    "schedule": {"schedule": Schedule.cosine, "warmup_steps": 2},
    "lora": {"lora": LoraConfig(rank=4, alpha=8.0)},
    "entropy target": {"algorithm": TARGETED},
    "moving reference": {
        "algorithm": replace(ALGORITHM, kl=Kl.k3, kl_coefficient=0.5, reference_every=2)
    },
    "critic": {"critic": CriticConfig(lr=1e-2), "num_critic_only_steps": 1},
}


def make(path: str, **changes: Any) -> ActorCritic | Learner:
    return (make_actor_critic if "critic" in changes else make_learner)(path, **changes)


def learner_of(trained: ActorCritic | Learner) -> Learner:
    return trained.policy if isinstance(trained, ActorCritic) else trained


def update(trained: ActorCritic | Learner, path: str, seed: int) -> float:
    """Train this rank's half of six examples; return the loss over all ranks."""
    examples = make_examples(path, noise=0.3, age=1, seed=seed)
    mine = examples[dist.get_rank() :: dist.get_world_size()]
    metrics = trained.update([[pack(mine, total=num_tokens([examples]))]]).read()
    learner_of(trained).offload()
    return metrics.get("loss/total", 0.0) + metrics.get("critic/loss", 0.0)


def whole(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_resumed_training_is_bit_identical(path, tmp_path, changes):
    """Fails when a part of the optimizer state, the step count, the learning rate schedule or the
    entropy bonus is not restored, or a tensor is read from its old address after it moved to the
    CPU.
    """
    with group_of_one():
        learner = make(path, **changes)
        for seed in range(3):
            update(learner, path, seed)
        snapshot = learner_of(learner).snapshot()
        expected = [update(learner, path, seed) for seed in range(3, 5)]
        snapshot.write(tmp_path)  # after the copy was made: training does not change it
        again = make(path, **changes)
        learner_of(again).load_state(tmp_path)
        assert [update(again, path, seed) for seed in range(3, 5)] == expected
        found, wanted = whole(learner_of(again)), whole(learner_of(learner))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def _run_rank(rank: int, path: str, folder: str) -> None:
    """Run one of two ranks: restore, train an update, write a snapshot."""
    with one_of(2, rank=rank, folder=folder):
        learner = make_actor_critic(path, algorithm=TARGETED, critic=CRITIC)
        learner.policy.load_state(Path(folder, "one"))
        loss = update(learner, path, 1)
        snapshot = learner.policy.snapshot()
        snapshot.write(Path(folder, "two"))
        Path(folder, f"bonus_{rank}").write_text(json.dumps(snapshot.counters["entropy_bonus"]))
        Path(folder, "loss").write_text(str(loss))


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_of_checkpoints_and_exports_have_the_default_file_mode(path, tmp_path, umask):
    """Fails when only the owner can read the weights, as safetensors writes them."""
    before = os.umask(umask)
    try:
        with group_of_one():
            learner = make_learner(path, lora=LoraConfig(rank=4, alpha=8.0))
            learner.export(tmp_path / "export")
            (tmp_path / "learner").mkdir()
            learner.snapshot().write(tmp_path / "learner")
        write_state({"tokens": array("i", [1, 2])}, tmp_path, "run")
    finally:
        os.umask(before)
    modes = {file: file.stat().st_mode & 0o777 for file in tmp_path.rglob("*") if file.is_file()}
    weights = {file.name for file in modes if file.suffix == ".safetensors"}
    assert weights >= {"model.safetensors", "adapter_model.safetensors", "run.safetensors"}
    assert len(weights) == 4
    assert set(modes.values()) == {0o666 & ~umask}


def test_the_number_of_ranks_may_change(path, tmp_path):
    """One rank, then two, then one: the losses are as with one rank throughout. Fails when the
    bounds of a shard are wrong, a rank reads what another one holds, or each rank uses its own
    entropy or standardises only its own advantages.
    """
    with group_of_one():
        learner = make_actor_critic(path, algorithm=TARGETED, critic=CRITIC)
        expected = [update(learner, path, 0)]
        learner.policy.snapshot().write(tmp_path / "one")
        expected.append(update(learner, path, 1))
        bonus = learner.policy.snapshot().counters["entropy_bonus"]
        expected.append(update(learner, path, 2))
    run_ranks(_run_rank, path, str(tmp_path), num_ranks=2)
    assert len(list((tmp_path / "two").glob("rank_*.safetensors"))) == 2
    for rank in range(2):
        found = json.loads((tmp_path / f"bonus_{rank}").read_text())
        assert found == pytest.approx(bonus, abs=1e-5)
    with group_of_one():
        again = make_actor_critic(path, algorithm=TARGETED, critic=CRITIC)
        again.policy.load_state(tmp_path / "two")
        losses = [float((tmp_path / "loss").read_text()), update(again, path, 2)]
    assert losses == pytest.approx(expected[1:], abs=1e-5)


@pytest.fixture
def saved(path, tmp_path):
    """Return a learner, and the folder with its state after one update."""
    with group_of_one():
        learner = make_learner(path)
        update(learner, path, 0)
        learner.snapshot().write(tmp_path)
        yield learner, tmp_path


def test_the_state_of_another_model_is_refused_by_name(saved, tmp_path_factory):
    """Fails when shapes are not compared before anything is read."""
    _, folder = saved
    other = write_model(tmp_path_factory.mktemp("other") / "untied", tied=False)
    with pytest.raises(TrainingStateError, match=r"is of another model: .*lm_head\.weight"):
        make_learner(other).load_state(folder)


def test_a_missing_file_of_a_rank_is_found(saved):
    """Fails when numbers that no file holds keep their old values."""
    learner, folder = saved
    name = next(folder.glob("rank_*.safetensors"))
    with torch.no_grad():
        tensors = load_file(name)
    key = "exp_avg.model.norm.weight"
    half = tensors[key].shape[0] // 2
    tensors[key] = tensors[key][:half].clone()
    boxes = {k: [[0, n] for n in t.shape] for k, t in tensors.items()}
    shapes = {k: list(t.shape) for k, t in tensors.items()} | {key: [2 * half]}
    save_file(tensors, name, {"boxes": json.dumps(boxes), "shapes": json.dumps(shapes)})
    with pytest.raises(TrainingStateError, match=rf"{half} of the {2 * half} numbers of {key}"):
        learner.load_state(folder)


def test_a_checkpoint_with_or_without_a_critic_is_not_reported_as_broken(path, tmp_path):
    """Fails when adding or removing a critic is reported as an unreadable file."""
    with group_of_one():
        with_critic, without = make_actor_critic(path, critic=CRITIC).policy, make_learner(path)
        with_critic.snapshot().write(tmp_path / "with")
        without.snapshot().write(tmp_path / "without")
        with pytest.raises(TrainingStateError, match="has no critic, and these settings train one"):
            with_critic.load_state(tmp_path / "without")
        with pytest.raises(TrainingStateError, match=r"another model: .*critic.*the settings of"):
            without.load_state(tmp_path / "with")


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 64, b"not a file of tensors"], ids=["empty", "zeros", "text"]
)
def test_a_file_that_is_not_safetensors_is_named(saved, content):
    """Fails when the user sees the library's own error."""
    learner, folder = saved
    next(folder.glob("rank_*.safetensors")).write_bytes(content)
    with pytest.raises(TrainingStateError, match=r"rank_00000\.safetensors cannot be read"):
        learner.load_state(folder)


def test_damaged_counters_are_named(saved):
    """Fails when optimizer.json is not checked."""
    learner, folder = saved
    (folder / "optimizer.json").write_text("[]")
    with pytest.raises(TrainingStateError, match=r"optimizer\.json cannot be read"):
        learner.load_state(folder)
