"""Tokens of parked samples reach an engine once: a controller and workers that exchange pickles."""

import pickle
from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from april_rl.training.rollout.requests import Parts, Requests
from april_rl.training.rollout.ticks import Completions
from april_rl.training.runtime.parked_tokens import ParkedTokens
from april_rl.types import Completion, SampleId


def requests_of(samples: dict[SampleId, Parts]) -> Requests:
    prompt_ids, indices = ([each[place] for each in samples] for place in (0, 1))
    same = [[each] * len(samples) for each in ((1, 2), 9)]  # prompt, budget
    return Requests(0, prompt_ids, indices, *same, parts=list(samples.values()))


def completion(sample_id: SampleId, parts: Parts, tokens: array, *, ends: bool) -> Completion:
    return Completion(
        sample_id=sample_id,
        start=sum(map(len, parts)),
        policy_version=0,
        context_version=0,
        token_ids=tokens,
        logprobs=array("d", [-1.0] * len(tokens)),
        finish_reason="stop" if ends else None,
    )


class Engine:
    """A controller's and a worker's side of one engine; all between them is pickled."""

    def __init__(self) -> None:
        self.controller, self.worker = ParkedTokens(), ParkedTokens()
        self.running: dict[SampleId, Parts] = {}
        self.num_bytes = 0

    def launch(self, samples: dict[SampleId, Parts]) -> None:
        """Send samples; every one must arrive whole."""
        sent = pickle.dumps(self.controller.omit(requests_of(samples)))
        self.num_bytes = len(sent)
        arrived = self.worker.complete(pickle.loads(sent))
        whole = requests_of(samples)
        assert [(each.parts, each.start, each.seed) for each in arrived.each()] == [
            (each.parts, each.start, each.seed) for each in whole.each()
        ]
        self.running |= zip(arrived.sample_ids, arrived.parts, strict=True)

    def abort(self, new: array, *, ends: bool = False, is_late: bool = False) -> Completions:
        """Give every sample back with `new` tokens; if late, the controller does not hear of it."""
        given = Completions(
            completion(sample_id, parts, new, ends=ends)
            for sample_id, parts in self.running.items()
        )
        self.running.clear()
        self.worker.park(given)
        if is_late:
            self.controller = ParkedTokens()
            return Completions()
        arrived = pickle.loads(pickle.dumps(given))
        self.controller.park(arrived)
        return arrived


EVENTS = st.tuples(
    st.integers(0, 1),  # engine
    st.lists(st.integers(0, 5), unique=True, max_size=4),  # samples
    st.integers(0, 2),  # new tokens of each
    st.sampled_from([False, False, False, True]),  # whether they end
    st.sampled_from([False, False, False, True]),  # whether the engine answers too late
    st.booleans(),  # whether an observation follows
)


@given(st.lists(EVENTS, max_size=20))
def test_every_sample_arrives_with_all_its_tokens(events):
    """Samples move between engines, get observations and end; an engine does not answer in time.
    Fails when tokens are left out that the worker does not have, or has otherwise.
    """
    engines, spans = [Engine(), Engine()], {SampleId(i // 2, i % 2): () for i in range(6)}
    for step, (number, samples, num_new, ends, is_late, observes) in enumerate(events):
        engine, ids = engines[number], [SampleId(i // 2, i % 2) for i in samples]
        engine.launch({sample_id: spans[sample_id] for sample_id in ids})
        new = array("i", [step] * num_new)
        for each in engine.abort(new, ends=ends, is_late=is_late):
            if each.token_ids:
                spans[each.sample_id] += (each.token_ids,)
            if observes:
                spans[each.sample_id] += (array("i", [-step]),)


def test_parked_tokens_are_sent_to_another_engine_and_never_again_to_their_own():
    """Fails when they are sent in each step, or an evaluation makes a worker forget them."""
    here, there = Engine(), Engine()
    sample_id, new = SampleId(0, 0), array("i", np.arange(50_000))
    here.launch({sample_id: ()})
    [first] = here.abort(new)
    spans: Parts = (first.token_ids,)
    here.launch({SampleId(7, 0): ()})
    here.abort(new, ends=True)
    here.launch({sample_id: spans})
    assert here.num_bytes < 1000
    [second] = here.abort(new)
    there.launch({sample_id: (*spans, second.token_ids)})
    assert there.num_bytes > 400_000
    here.launch({sample_id: (*spans, second.token_ids)})
    assert here.num_bytes < 1000
