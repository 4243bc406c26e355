"""What travels back from engines."""

import math
import pickle
from array import array
from dataclasses import replace

from light_samples import completion

from april_rl import ticks
from april_rl.ticks import Completions

SHORT = completion(1, start=4, num_tokens=2, version=7)
PARTS = (
    completion(3, start=0, num_tokens=5, version=2),
    replace(SHORT, context_version=6, token_ids=array("i", [8, 2**31 - 1])),
    replace(completion(0, start=9, num_tokens=0, version=7), finish_reason="stop"),
)


def test_the_columns_are_the_numbers_of_the_completions():
    """Fails when a column is another one's, or those of several are joined in another order."""
    for completions in (
        Completions(PARTS),
        Completions.joined([Completions(PARTS[:1]), Completions(), Completions(PARTS[1:])]),
    ):
        assert completions == PARTS
        columns = completions.columns
        assert columns.prompt_id.tolist() == [1, 1, 1]
        assert columns.index.tolist() == [3, 1, 0]
        assert columns.start.tolist() == [0, 4, 9]
        assert columns.num_tokens.tolist() == [5, 2, 0]
        assert columns.policy_version.tolist() == [2, 7, 7]
        assert columns.context_version.tolist() == [2, 6, 7]
        assert columns.is_finished.tolist() == [False, False, True]
    assert [column.size for column in Completions().columns] == [0] * 7


def test_completions_arrive_as_they_were_sent(monkeypatch):
    """Fails when a token or a bit of a log-probability is lost or another sample's, the reason of
    an end is another, or the columns are made again where they arrive.
    """
    exact = replace(PARTS[0], logprobs=array("d", [-0.1, -1e-300, 0.0, -math.inf, -2 / 3]))
    truncated = replace(SHORT, finish_reason="length")
    sent = Completions([exact, *PARTS[1:], truncated])
    columns = [column.tolist() for column in sent.columns]
    packed = pickle.dumps([sent, Completions()])
    monkeypatch.setattr(ticks, "_numbers_of", None)
    arrived, nothing = pickle.loads(packed)
    assert nothing == ()
    assert [column.tolist() for column in arrived.columns] == columns
    for here, there in zip(arrived, sent, strict=True):
        assert (here.token_ids, here.logprobs) == (
            array("i", there.token_ids),
            array("d", there.logprobs),
        )
        assert replace(here, token_ids=(), logprobs=()) == replace(there, token_ids=(), logprobs=())
