"""One worker and several workers learn the same, and a weight sync stays within its memory."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing
from forked_ranks import one_of, results_of_ranks
from learner_setup import Example, group_of_one, make_examples, make_learner, write_model
from light_samples import make_packer, whole_sample
from own_process import peak_growth
from transformers import Qwen3Config, Qwen3ForCausalLM

from april_rl.config.choices import ComputeDtype
from april_rl.metrics import Metrics, merge
from april_rl.types import Group, Prompt, Sample, ScoredGroup

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]
NUM_RANKS, NUM_UPDATES = 2, 3
_MMAP_THRESHOLD = -3  # the value in malloc.h
REWARDS = (0.0, 1.0)
LARGEST = 48_000 * 512  # number of parameters of the embedding in the model below


def sample_of(example: Example, prompt: Prompt, index: int) -> Sample:
    response = example.token_ids[example.num_prompt :]
    logprobs = tuple(example.behaviour_logprobs.tolist())
    return whole_sample(prompt, index, response, logprobs=logprobs)


def groups_of(examples: list[Example]) -> list[ScoredGroup]:
    """Return a group for every two samples; their lengths differ, so that no split over ranks is
    even.
    """
    groups = []
    for number in range(0, len(examples), 2):
        pair = examples[number : number + 2]
        # One prompt per group, although each example has one: no test reads their text.
        prompt = Prompt(
            id=number,
            token_ids=pair[0].token_ids[: pair[0].num_prompt],
            text="",
            answer="",
            source="test",
        )
        samples = tuple(sample_of(example, prompt, i) for i, example in enumerate(pair))
        groups.append(ScoredGroup(group=Group(prompt=prompt, samples=samples), rewards=REWARDS))
    return groups


def updates(path: str, *, rank: int, num_ranks: int) -> tuple[list[Metrics], dict[str, object]]:
    """Return the metrics of a few updates on the same groups, planned for `num_ranks`, and the
    weights after them.
    """
    # The behaviour log-probabilities belong to other prompts.
    learner = make_learner(path, max_mismatch=100.0)
    packer = make_packer(num_ranks=num_ranks, max_tokens=128, max_staleness=2, age_decay=0.5)
    metrics = []
    for version in range(NUM_UPDATES):
        groups = groups_of(make_examples(path, noise=0.3, age=0, seed=version))
        advantages = [np.array([-1.0, 1.0])] * len(groups)
        batch = packer.pack(groups, advantages, policy_version=version % 2)
        metrics.append(learner.update(batch.of_rank(rank)))
    return metrics, dict(learner.weights())


def updates_of_rank(rank: int, folder: str) -> tuple[list[Metrics], dict[str, object]]:
    return updates(f"{folder}/model", rank=rank, num_ranks=NUM_RANKS)


def test_two_workers_have_the_loss_of_one_on_the_same_groups(tmp_path: Path) -> None:
    """Within 1e-5, since the packer's plans differ; later losses use weights that two workers have
    updated. Fails when the loss is averaged over ranks, or a rank's share is weighted by itself.
    """
    write_model(tmp_path / "model")
    ranks = results_of_ranks(updates_of_rank, tmp_path, num_ranks=NUM_RANKS)
    with group_of_one():
        one, weights = updates(str(tmp_path / "model"), rank=0, num_ranks=1)
    for update, expected in enumerate(one):
        found = merge(metrics[update] for metrics, _ in ranks).read()
        for key in ("loss/total", "loss/grad_norm", "loss/ratio_mean", "loss/clip_frac"):
            assert found[key] == pytest.approx(expected.read()[key], abs=1e-5, rel=1e-5), key
    assert len({one[update].read()["loss/total"] for update in range(NUM_UPDATES)}) == NUM_UPDATES
    for name, tensor in weights.items():
        torch.testing.assert_close(ranks[0][1][name], tensor, atol=1e-3, rtol=1e-2)
        assert torch.equal(ranks[0][1][name], ranks[1][1][name])


def run_stream(rank: int, folder: str) -> None:
    libc = ctypes.CDLL("libc.so.6")
    # Return tensors to the system as soon as they are freed. Otherwise the allocator would learn to
    # keep blocks as large as the first ones: up to one and a half times the largest tensor.
    libc.mallopt(_MMAP_THRESHOLD, 1 << 20)
    with one_of(NUM_RANKS, rank=rank, folder=folder):
        learner = make_learner(f"{folder}/model", compute_dtype=ComputeDtype.bfloat16)
        # Return the freed memory of loading first: a stream that keeps everything could hide in it.
        libc.malloc_trim(0)
        with peak_growth() as peak:
            sizes = [tensor.nbytes for _, tensor in learner.weights()]
        torch.save((peak[0], sizes), f"{folder}/rank{rank}.pt")


@pytest.mark.soak
def test_streamed_weights_never_need_three_times_the_largest_tensor(tmp_path: Path) -> None:
    """With a model more than six times as large as its embedding, over two ranks. Fails when the
    stream keeps tensors that it has yielded, or casts after the gather instead of before it.
    """
    config = Qwen3Config(
        vocab_size=48_000,
        hidden_size=512,
        intermediate_size=8192,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    torch.multiprocessing.spawn(run_stream, args=(str(tmp_path),), nprocs=NUM_RANKS)
    for rank in range(NUM_RANKS):
        peak, sizes = torch.load(tmp_path / f"rank{rank}.pt")
        assert max(sizes) == 2 * LARGEST
        assert sum(sizes) > 6 * max(sizes)
        assert peak <= 3 * max(sizes), f"{peak / max(sizes):.2f} times the largest tensor"
