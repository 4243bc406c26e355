"""Loading a checkpoint takes little more memory than a shard, and an export keeps every
bit of it.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from accelerate import init_empty_weights
from forked_ranks import one_of
from learner_setup import build_policy, group_of_one, make_learner, write_model
from own_process import peak_growth
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_qwen3
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from april_rl.config.choices import ComputeDtype
from april_rl.errors import ExportError
from april_rl.training.learner.model.export import export

NUM_RANKS = 2
# Untied, so that the last tensor is one of the two large ones, when everything else is already
# loaded.
LARGE = Qwen3Config(
    vocab_size=48_000,
    hidden_size=768,
    intermediate_size=2304,
    num_hidden_layers=5,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    tie_word_embeddings=False,
)


def write_large(folder: Path) -> int:
    """Write a bfloat16 checkpoint of LARGE in two files; return the number of its parameters."""
    with init_empty_weights():
        model = Qwen3ForCausalLM(LARGE)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    folder.mkdir()
    LARGE.save_pretrained(folder)
    names = list(shapes)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        tensors = {name: torch.full(shapes[name], 0.01, dtype=torch.bfloat16) for name in part}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {name: file for file, part in halves.items() for name in part}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return sum(shape.numel() for shape in shapes.values())


def load_as_rank(rank: int, folder: str) -> None:
    """Run one of the processes: load a small model so that everything is imported, then the large
    one.
    """
    with one_of(NUM_RANKS, rank=rank, folder=folder):
        build_policy(f"{folder}/small")
        with peak_growth() as peak:
            policy = build_policy(f"{folder}/large")
        shard = sum(parameter.to_local().nbytes for parameter in policy.parameters())
        Path(folder, f"rank{rank}.json").write_text(json.dumps({"peak": peak[0], "shard": shard}))


@pytest.mark.soak
@pytest.mark.slow
def test_loading_takes_little_more_memory_than_the_shard(tmp_path):
    """Fails when a rank holds a second copy of its slice of a tensor besides the shard, or a whole
    tensor, or master weights that belong to another rank.
    """
    write_tiny_qwen3(tmp_path / "small")
    num_parameters = write_large(tmp_path / "large")
    assert num_parameters > 100e6
    torch.multiprocessing.spawn(load_as_rank, args=(str(tmp_path),), nprocs=NUM_RANKS)
    for rank in range(NUM_RANKS):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert seen["shard"] == pytest.approx(4 * num_parameters / NUM_RANKS, rel=0.01)
        assert seen["peak"] < 1.1 * seen["shard"], seen


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("max_bytes", [2**31, 40_000], ids=["one_file", "several_files"])
def test_loading_exporting_and_loading_again_keeps_every_bit(tmp_path, is_tied, max_bytes):
    """Load from one file and from several; export into one and into several."""
    path = write_model(tmp_path / "stored", tied=is_tied)
    stored = load_file(Path(path, "model.safetensors"))
    parts = tmp_path / "parts"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(parts, max_shard_size="100KB")
    with group_of_one():
        for source in (Path(path), parts):
            learner = make_learner(str(source), compute_dtype=ComputeDtype.bfloat16)
            weights = dict(learner.weights())
            sizes = [tensor.nbytes for tensor in weights.values()]
            target = tmp_path / f"exported_{source.name}"
            export(
                weights.items(),
                dtype=torch.bfloat16,
                sizes=sizes,
                source=source,
                target=target,
                max_bytes=max_bytes,
            )
            again = dict(make_learner(str(target)).weights())
            assert again.keys() == stored.keys()
            assert all(torch.equal(again[name], stored[name]) for name in stored)
            files = sorted(target.glob("*.safetensors"))
            assert (len(files) > 1) == (max_bytes == 40_000)
            loaded = dict(AutoModelForCausalLM.from_pretrained(target).named_parameters())
            assert all(torch.equal(tensor, stored[name]) for name, tensor in loaded.items())
            written = {name: t for file in files for name, t in load_file(file).items()}
            assert all(torch.equal(written[name], stored[name]) for name in stored)


def test_a_failed_export_raises_one_error_after_all_weights_were_gathered(tmp_path):
    """The other ranks gather each tensor together with this one. Fails when they would wait
    forever.
    """
    path = write_model(tmp_path / "model")
    (tmp_path / "exports").write_text("in the way")
    gathered = []
    with group_of_one(), pytest.raises(ExportError, match=r"could not be exported to .*Not a d"):
        export(
            ((name, gathered.append(name) or torch.ones(2)) for name in ("a", "b", "c")),
            dtype=torch.float32,
            sizes=[8, 8, 8],
            source=Path(path),
            target=tmp_path / "exports" / "step_1",
        )
    assert gathered == ["a", "b", "c"]
