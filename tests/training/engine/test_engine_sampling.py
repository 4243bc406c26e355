"""Temperature and top-p of single requests have the right distribution and do not affect other
requests.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_engine_noise import assert_chi_square

from april_rl.training.engine.cpu.sampler import SAMPLING, SEED, CounterSampler, nucleus
from april_rl.training.rollout.requests import Sampling

pytestmark = pytest.mark.slow  # imports vllm

TEMPERATURE = 0.9
LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.0001, 0.3, 0.15, 0.0999]))
AIME = Sampling(temperature=0.6, top_p=0.8)


def float64_nucleus(logits: np.ndarray, *, temperature: float, top_p: float) -> np.ndarray:
    """Return the probabilities of Holtzman et al. 2020, section 3.1, token by token."""
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    kept, total = np.zeros_like(probabilities), 0.0
    for token in np.argsort(-probabilities, kind="stable"):
        kept[token] = probabilities[token]
        total += probabilities[token]
        if total >= top_p:
            break
    return kept / kept.sum()


def sampler(
    samplings: list[Sampling | None], positions: np.ndarray | None = None
) -> CounterSampler:
    """Return a sampler on a batch with a row for each sampling setting; row i has the seed i."""
    requests = {}
    for row, sampling in enumerate(samplings):
        arguments = {SEED: row} | ({SAMPLING: sampling} if sampling else {})
        requests[str(row)] = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=arguments))
    if positions is None:
        positions = np.full(len(samplings), 3)
    batch = SimpleNamespace(req_ids=list(requests), num_tokens_no_spec=positions)
    runner = SimpleNamespace(input_batch=batch, requests=requests)
    return CounterSampler(runner, temperature=TEMPERATURE)


def forward(
    samplings: list[Sampling | None], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and log-probabilities [B] of one step."""
    output = sampler(samplings).forward(logits.clone(), None)
    return output.sampled_token_ids[:, 0], output.logprobs_tensors.logprobs[:, 0]


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.5, 0.75, 0.95, 0.999])
def test_the_nucleus_equals_a_float64_reference(top_p: float) -> None:
    """For almost flat, ordinary and peaked distributions. Fails when the token that reaches top_p
    is left out, one too many is included, or only the first 1024 are considered.
    """
    rng = np.random.default_rng(0)
    for vocabulary, scale in ((7, 1.0), (3000, 0.1), (20_000, 2.0), (1000, 30.0)):
        logits = torch.from_numpy(rng.normal(size=(2, vocabulary)) * scale).float()
        logprobs = logits.log_softmax(dim=-1)
        found = nucleus(logprobs, torch.full((2,), top_p)).exp().double().numpy()
        for row, kept in zip(logprobs.numpy(), found, strict=True):
            expected = float64_nucleus(row, temperature=1.0, top_p=top_p)
            assert abs(np.count_nonzero(kept) - np.count_nonzero(expected)) <= (top_p > 0.99)
            assert kept / kept.sum() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("sampling", [AIME, Sampling(1.7, 1.0), Sampling(0.8, 0.6)])
def test_tokens_have_the_frequencies_of_the_nucleus(sampling: Sampling) -> None:
    """Fails when a token outside the nucleus is drawn, or one inside too often or too rarely."""
    count = 10_000
    tokens, logprobs = forward([sampling] * count, LOGITS.expand(count, -1))
    expected = float64_nucleus(LOGITS.numpy(), **sampling._asdict())
    counts = np.bincount(tokens.numpy(), minlength=len(expected))
    inside = expected > 0
    assert counts[~inside].sum() == 0
    assert_chi_square(counts[inside], count * expected[inside])
    assert logprobs.exp().numpy() == pytest.approx(expected[tokens.numpy()], rel=1e-4)


def test_training_rows_do_not_change_by_a_bit_when_other_rows_join() -> None:
    """Fails when rows without their own sampling setting are divided by a vector, or cut off."""
    logits = torch.randn((8, 500), generator=torch.Generator().manual_seed(0))
    alone = forward([None] * 8, logits)
    mixed = forward([AIME if row % 2 else None for row in range(8)], logits)
    for of_all, beside in zip(alone, mixed, strict=True):
        assert torch.equal(of_all[::2], beside[::2])
        assert not torch.equal(of_all[1::2], beside[1::2])
