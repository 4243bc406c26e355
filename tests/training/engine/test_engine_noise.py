"""The noise of the CPU sampler has the right distribution and depends only on seed and position."""

import numpy as np
import pytest
import torch

from april_rl.training.engine.cpu.sampler import gumbel_argmax, noise_seeds

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]

NUM_DRAWS = 100_000
PROBABILITIES = np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.009, 0.001])


def draw(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    logprobs = torch.from_numpy(np.log(PROBABILITIES)).float().expand(len(seeds), -1).contiguous()
    return gumbel_argmax(logprobs, noise_seeds(seeds, positions)).numpy()


def assert_chi_square(counts: np.ndarray, expected: np.ndarray) -> None:
    """Check that Pearson's statistic is within five standard deviations of its mean, the degrees of
    freedom.
    """
    degrees = counts.size - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("kind", ["one sample", "siblings", "random seeds"])
def test_tokens_have_the_frequencies_the_model_gives_them(kind: str) -> None:
    count = np.arange(NUM_DRAWS, dtype=np.int64)
    seeds, positions = {
        "one sample": (np.full_like(count, 42), count),
        "siblings": (count, np.full_like(count, 17)),
        "random seeds": (np.random.default_rng(0).integers(0, 2**63, NUM_DRAWS), count % 512),
    }[kind]
    counts = np.bincount(draw(seeds, positions), minlength=len(PROBABILITIES))
    assert_chi_square(counts, NUM_DRAWS * PROBABILITIES)


@pytest.mark.parametrize("neighbour", ["next position", "next seed"])
def test_neighbouring_draws_are_independent(neighbour: str) -> None:
    count = np.arange(NUM_DRAWS, dtype=np.int64)
    seeds, positions = count // 100, count % 100
    first = draw(seeds, positions)
    second = (
        draw(seeds, positions + 1) if neighbour == "next position" else draw(seeds + 1, positions)
    )
    num_tokens = 5  # only the frequent tokens, so that every cell is well filled
    is_frequent = (first < num_tokens) & (second < num_tokens)
    pairs = first[is_frequent] * num_tokens + second[is_frequent]
    frequent = PROBABILITIES[:num_tokens] / PROBABILITIES[:num_tokens].sum()
    assert_chi_square(
        np.bincount(pairs, minlength=num_tokens**2),
        len(pairs) * np.outer(frequent, frequent).ravel(),
    )


def test_a_draw_depends_only_on_seed_and_position() -> None:
    rng = np.random.default_rng(1)
    seeds, positions = rng.integers(0, 2**63, 64), rng.integers(0, 1000, 64)
    together = draw(seeds, positions)
    order = rng.permutation(64)
    assert (draw(seeds[order], positions[order]) == together[order]).all()
    alone = [draw(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(64)]
    assert (together == alone).all()


def test_all_bits_of_a_seed_count() -> None:
    seeds = np.array([5, 5 + 2**32, 5 + 2**62], dtype=np.int64)
    draws = [draw(np.full(50, s), np.arange(50)).tolist() for s in seeds]
    assert len({tuple(d) for d in draws}) == 3
