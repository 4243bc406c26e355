"""Results of engines, as they are sent to the controller."""

import math
import pickle
from array import array
from dataclasses import replace

from light_samples import completion

from april_rl.training.rollout.ticks import Completions
from april_rl.types import Experts

SHORT = completion(1, start=4, num_tokens=2, version=7)
PARTS = (
    completion(3, start=0, num_tokens=5, version=2),
    replace(SHORT, context_version=6, token_ids=array("i", [8, 2**31 - 1])),
    replace(completion(0, start=9, num_tokens=0, version=7), finish_reason="stop"),
)


def test_completions_arrive_as_they_were_sent():
    """Fails when a token or a bit of a log-probability is lost or goes to another sample, or the
    finish reason changes.
    """
    exact = replace(PARTS[0], logprobs=array("d", [-0.1, -1e-300, 0.0, -math.inf, -2 / 3]))
    truncated = replace(SHORT, finish_reason="length")
    routed = replace(SHORT, experts=Experts(array("H", [1, 300, 2, 4]), 1, 2))
    sent = Completions([exact, *PARTS[1:], truncated, routed])
    arrived, nothing = pickle.loads(pickle.dumps([sent, Completions()]))
    assert nothing == ()
    assert isinstance(arrived, Completions)
    for here, there in zip(arrived, sent, strict=True):
        assert (here.token_ids, here.logprobs) == (
            array("i", there.token_ids),
            array("d", there.logprobs),
        )
        assert replace(here, token_ids=(), logprobs=()) == replace(there, token_ids=(), logprobs=())
