"""Checkpoints from which a run refuses to continue, because of their run or their model."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoints import write

from april_rl.config import TrainConfig
from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Kl
from april_rl.config.lora import LoraConfig
from april_rl.config.task import ModelConfig
from april_rl.run.checkpointing.manifest import CheckpointError
from april_rl.run.checkpointing.resume import load
from april_rl.start.assembly.resume_checks import OtherModelError, check_resume, model_identity
from april_rl.training.learner.model.sizes import ModelSizes
from april_rl.training.rollout.codec import FORMAT

NO_GROUPS: dict[str, list] = {"open": [], "ready": []}
COLLECTOR = {
    **{"format": FORMAT, "num_groups": 1, "group_size": 8, "max_staleness": 0},
    "buffer": NO_GROUPS,
}


def model(folder: Path, *, seed: int) -> str:
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    save_file({"w": torch.randn(64, 64, generator=generator)}, folder / "model.safetensors")
    return str(folder)


def adapters(path: str) -> TrainConfig:
    return TrainConfig(model=ModelConfig(path=path), lora=LoraConfig(rank=2, alpha=8.0))


def sizes_of(**sizes: int) -> ModelSizes:
    named = dict.fromkeys((field.name for field in fields(ModelSizes)), 8)
    return ModelSizes(**(named | sizes))


def state(config: TrainConfig, **sizes: int) -> dict:
    return {"collector": COLLECTOR, "base": model_identity(config, sizes_of(**sizes))}


def check(config: TrainConfig, saved: dict, **sizes: int) -> None:
    check_resume(config, saved, model=model_identity(config, sizes_of(**sizes)))


def test_adapters_resume_with_the_same_weights_in_another_folder(tmp_path):
    """Fails when the path is compared, or some of the files are not."""
    saved = state(adapters(model(tmp_path / "a", seed=0)))
    check(adapters(model(tmp_path / "b", seed=0)), saved)
    with pytest.raises(OtherModelError, match=r"model\.path=.*c has other weights"):
        check(adapters(model(tmp_path / "c", seed=1)), saved)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (LoraConfig(rank=2, alpha=80.0), r"lora\.alpha=80, but the saved run had 8"),
        (LoraConfig(rank=4, alpha=8.0), r"lora\.rank=4, but the saved run had 2"),
        (LoraConfig(), r"lora\.rank=null, but the saved run had 2"),
        (
            LoraConfig(rank=2, alpha=8.0, target_modules=["q_proj", "v_proj"]),
            r"lora\.target_modules=\[q_proj,v_proj\], but the saved run had null",
        ),
    ],
)
def test_other_adapters_are_refused_by_their_setting(tmp_path, changed, said):
    """Fails when only the workers find it, after the model is loaded."""
    config = adapters(model(tmp_path / "a", seed=0))
    with pytest.raises(OtherModelError, match=said):
        check(replace(config, lora=changed), state(config))


@pytest.mark.parametrize("name", ["hidden_size", "num_layers", "num_heads", "num_parameters"])
def test_a_model_with_other_sizes_is_refused_before_it_is_loaded(tmp_path, name):
    """Another number of heads with the same total size loads without an error, but computes
    something else.
    """
    full = TrainConfig(model=ModelConfig(path=model(tmp_path / "a", seed=0)))
    with pytest.raises(OtherModelError, match=f"has {name} 9, but the model of the checkpoint"):
        check(full, state(full), **{name: 9})


def test_the_reference_of_a_run_must_be_the_same_but_trained_weights_may_differ(tmp_path):
    """A checkpoint contains every trained weight. Fails when a run without a reference
    is refused.
    """
    first, other = (model(tmp_path / name, seed=n) for n, name in enumerate("ab"))
    full = TrainConfig(model=ModelConfig(path=first))
    check(replace(full, model=ModelConfig(path=other)), state(full))
    with_reference = replace(full, algorithm=AlgorithmConfig(kl=Kl.k3, kl_coefficient=0.1))
    with pytest.raises(OtherModelError, match="has other weights"):
        check(replace(with_reference, model=ModelConfig(path=other)), state(with_reference))


def test_a_run_resumed_from_elsewhere_is_neither_restarted_nor_mixed_with_another(tmp_path):
    """It was killed before its own first checkpoint, or was resumed from another run although it
    has checkpoints. Fails when `auto` starts at step 0, or two runs share a folder of checkpoints.
    """
    origin, run_dir = write(tmp_path / "old" / "checkpoints", 50), tmp_path / "new"
    run_dir.mkdir()
    assert load("auto", run_dir) is None
    (run_dir / "config.yaml").write_text(f"resume: {origin}\n")
    with pytest.raises(CheckpointError, match=rf"give resume={origin} again"):
        load("auto", run_dir)
    write(run_dir / "checkpoints", 53)
    with pytest.raises(CheckpointError, match=r"is another run's, but .* a new hydra\.run\.dir"):
        load(str(origin), run_dir)
