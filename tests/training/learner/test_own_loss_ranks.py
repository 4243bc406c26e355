"""A user's loss on two ranks of which one fails, or has a row without response tokens."""

from pathlib import Path

import pytest
import torch
from forked_ranks import one_of, run_ranks
from learner_setup import (
    ALGORITHM,
    learner_logprobs,
    make_examples,
    make_learner,
    num_tokens,
    pack,
    write_model,
)

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.user_code import OwnFunctionError
from april_rl.training.algorithm.losses import LossInputs, TokenLoss, loss_function
from april_rl.training.learner.own_loss import load_loss

pytestmark = pytest.mark.slow
NUM_RANKS = 2


def picky(inputs: LossInputs) -> TokenLoss:
    """Return the built-in loss; `max` needs a token, and no response may have more than ten."""
    inputs.advantages.clamp_(min=-9.0)  # in place
    if inputs.responses.lengths.max() > 10:
        raise KeyError("too long")
    if not (inputs.advantages < 0).any():
        return TokenLoss(torch.zeros_like(inputs.logprobs), inputs.logprobs > 0)
    return loss_function(ALGORITHM)(inputs)


def run_rank(rank: int, folder: str) -> None:
    """Make a good update and one whose second minibatch fails on the second rank alone."""
    with one_of(NUM_RANKS, rank=rank, folder=folder):
        path = f"{folder}/model"
        loss = load_loss(AlgorithmConfig(loss="test_own_loss_ranks:picky"))
        learner = make_learner(path, loss=loss)
        examples = make_examples(path, noise=0.02, age=1)
        short = [each for each in examples if each.num_response <= 10]
        long = [each for each in examples if each.num_response > 10]
        assert short
        assert long
        total = num_tokens([short])
        first = [pack([short, []][rank], total=total)]
        assert "loss/total" in learner.update([first])
        before = learner_logprobs(learner, short)
        with pytest.raises(OwnFunctionError, match=r"picky: KeyError: 'too long'"):
            learner.update([[pack([short, long][rank], total=total)], first])
        assert torch.equal(learner_logprobs(learner, short), before)
        assert "loss/total" in learner.update([first])


def test_a_loss_that_fails_on_one_rank_changes_no_weight_and_raises_on_all(tmp_path: Path) -> None:
    """Fails when the other rank waits forever, the weights change, or a row without tokens or
    without gradient ends the update.
    """
    write_model(tmp_path / "model")
    run_ranks(run_rank, str(tmp_path), num_ranks=NUM_RANKS)
