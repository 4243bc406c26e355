"""Samplers: which prompt of a data set comes next, and exact resumption with what they learned."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_data_stream import prompts_of

from april_rl.config.task import DataConfig
from april_rl.config.user_code import OwnFunctionError
from april_rl.errors import DataError
from april_rl.start.assembly.sampler import sampler_maker
from april_rl.task.data.samplers import ByPassRate
from april_rl.task.data.stream import MixedStream, PromptStream


def stream(sampler="pass_rate", count=6, **args):
    config = DataConfig(path="x", sampler=sampler, sampler_args=args)
    return PromptStream(prompts_of(count), seed=3, new_sampler=sampler_maker(config, seed=3))


def draws_of(sampler, count):
    return [sampler.draw() for _ in range(count)]


def test_an_unknown_prompt_is_never_skipped():
    assert sorted(draws_of(ByPassRate(7, 0), 7)) == list(range(7))


def test_the_probability_of_a_prompt_is_the_expected_variance_of_its_rewards():
    """E[p (1 - p)] from integrating the Beta posterior, divided by its value for the prior."""
    sampler = ByPassRate(3, 0, least=0.01)
    sampler.learn(0, [1.0] * 8)
    sampler.learn(1, [1.0] * 3 + [0.0] * 5)
    p = (np.arange(200_000) + 0.5) / 200_000
    for index, passes, failures in ((0, 8, 0), (1, 3, 5), (2, 0, 0)):
        density = p**passes * (1 - p) ** failures
        expected = float((density * p * (1 - p)).sum() / density.sum()) * 6
        assert sampler.chance(index) == pytest.approx(min(1.0, expected), rel=1e-6)


def test_prompts_without_signal_are_drawn_less_often_but_never_left_out():
    sampler = ByPassRate(40, 1)
    counts = np.zeros(40)
    for _ in range(4000):
        index = sampler.draw()
        counts[index] += 1
        sampler.learn(index, [1.0, 0.0] * 8 if index < 20 else [1.0] * 16)
    assert counts[:20].min() > 1.5 * counts[20:].max()
    assert counts.min() > 20


def test_each_prompt_is_skipped_by_its_own_threshold():
    sampler = ByPassRate(64, 0)
    for index in range(0, 64, 2):
        sampler.learn(index, [1.0] * 50)
    order, thresholds = sampler._order, sampler._thresholds
    expected = [
        int(i) for i, t in zip(order, thresholds, strict=True) if t < sampler.chance(int(i))
    ]
    assert 32 < len(expected) < 64
    assert [sampler.draw() for _ in expected] == expected


def test_knowledge_fades_with_the_epochs():
    sampler = ByPassRate(1, 0, forget=0.25, least=0.001)
    sampler.draw()
    sampler.learn(0, [0.0] * 64)
    chances = [sampler.chance(0)]
    while sampler.chance(0) < 1.0:
        sampler.draw()
        chances.append(sampler.chance(0))
    assert chances[0] < 0.1
    assert chances == sorted(chances)


def test_rewards_with_another_range_are_scaled():
    plain, scaled = ByPassRate(1, 0), ByPassRate(1, 0, low=-1.0, high=1.0)
    plain.learn(0, [1.0, 0.0, 0.5, 1.0])
    scaled.learn(0, [1.0, -1.0, 0.0, 3.0])
    assert plain.chance(0) == scaled.chance(0)


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 30), st.booleans())
def test_a_restored_stream_keeps_what_it_learned(count, before, elsewhere, is_own):
    name = "own_samplers:Backwards" if is_own else "pass_rate"
    source, other = stream(name, count), stream(name, count)
    drawn = [source.take() for _ in range(before)]
    for taken in drawn[::2]:
        source.learn(taken, [float(len(taken.text) % 2), 0.0])
    for _ in range(elsewhere):
        other.learn(other.take(), [1.0, 1.0])
    other.restore(json.loads(json.dumps(source.save())))
    for under_way in drawn[1::2]:
        source.learn(under_way, [0.0, 0.0])
        other.learn(under_way, [0.0, 0.0])
    for _ in range(20):
        mine, theirs = source.take(), other.take()
        assert mine == theirs
        source.learn(mine, [0.0, 0.0])
        other.learn(theirs, [0.0, 0.0])


def test_rewards_reach_the_sampler_with_the_prompt_that_was_drawn():
    source = stream("own_samplers:Backwards", 4)
    first, second = source.take(), source.take()
    assert [first.text, second.text] == ["3", "2"]
    source.learn(second, [0.0, 0.0])
    source.learn(first, [1.0, 0.0])
    assert [source.take().text for _ in range(2)] == ["2", "1"]


def test_each_source_of_a_mixture_has_its_own_sampler():
    config = DataConfig(path="x", sampler="own_samplers:Backwards")
    sets = {name: prompts_of(3, name) for name in "ab"}
    maker = sampler_maker(config, seed=0)
    streams = {n: PromptStream(p, seed=0, name=n, new_sampler=maker) for n, p in sets.items()}
    source = MixedStream(streams, {"a": 1, "b": 1})
    taken = [source.take() for _ in range(4)]
    assert [(p.id, p.dataset, p.text) for p in taken] == [
        (0, "a", "2"),
        (1, "b", "2"),
        (2, "a", "1"),
        (3, "b", "1"),
    ]
    source.learn(taken[1], [0.0, 0.0])
    assert [(p.dataset, p.text) for p in (source.take(), source.take())] == [("a", "0"), ("b", "2")]


@pytest.mark.parametrize(
    ("sampler", "args", "sentence"),
    [
        ("nowhere:Sampler", {}, "there is no module nowhere"),
        ("own_samplers:Missing", {}, "has no function 'Missing'"),
        ("own_samplers:Backwards", {"size": 1}, "unexpected keyword argument 'size'"),
        ("own_samplers:Fails", {}, "draw of Fails failed: RuntimeError: no prompt left"),
        ("own_samplers:Ends", {}, "draw of Ends failed: StopIteration"),
        ("own_samplers:WithoutState", {}, "lacks the method save"),
        ("own_samplers:WithoutSeed", {}, r"it is called as f\(num_prompts, seed, NAME=…\)"),
        ("own_samplers:TooFar", {}, "returned 2 of type int for 2 prompts; .* from 0 to 1"),
        ("own_samplers:Half", {}, r"draw of Half returned 0\.5 of type float"),
        ("own_samplers:SavesNumpy", {}, "float32 is not JSON .* plain numbers, texts, lists, and"),
        ("own_samplers:SavesByIndex", {}, "it would turn keys of a dict into texts"),
        ("pass_rate", {"low": 1.0, "high": 0.0}, "needs low < high"),
        ("pass_rate", {"size": 1}, "unexpected keyword argument 'size'"),
    ],
)
def test_a_sampler_that_cannot_be_used_is_refused_by_name(sampler, args, sentence):
    with pytest.raises(OwnFunctionError, match=f"data.sampler={sampler} .*{sentence}"):
        stream(sampler, **args)


def test_a_numpy_index_is_accepted_and_saved_as_a_number():
    source = stream("own_samplers:Numpy")
    assert source.take().text == "5"
    assert json.loads(json.dumps(source.save()))["drawn"] == [[0, 5]]


def test_later_draws_of_a_sampler_are_checked_during_the_run():
    sentence = (
        r"data\.sampler: draw of FailsLater returned 5\.5 of type float for 6 prompts; .* 0 to 5"
    )
    with pytest.raises(DataError, match=sentence):
        stream("own_samplers:FailsLater").take()


def test_a_state_that_cannot_be_saved_in_a_checkpoint_ends_the_run():
    """Fails when only the checkpoint writer finds it, because the run then continues without
    checkpoints.
    """
    source = stream("own_samplers:SavesNumpyLater")
    source.learn(source.take(), [1.0, 0.0])
    with pytest.raises(DataError, match=r"data\.sampler: what save of SavesNumpyLater returned"):
        source.save()


def test_a_saved_state_does_not_change_with_the_sampler():
    """A thread writes it while training continues. Fails when the sampler's own list is saved."""
    source = stream("own_samplers:Backwards", 4)
    first = source.take()
    source.learn(first, [0.0])
    saved = source.save()
    source.take()
    assert saved["sampler"]["failed"] == [3]


def test_an_error_of_a_sampler_names_it():
    """Fails when the error ends the run before anything is saved."""
    source = stream("own_samplers:FailsToLearn", 4)
    taken = source.take()
    with pytest.raises(DataError, match="learn of FailsToLearn failed: ZeroDivisionError: float"):
        source.learn(taken, [])


def test_the_state_of_another_sampler_is_refused():
    with pytest.raises(DataError, match=r"data\.sampler is ByPassRate, .* state of Shuffled"):
        stream().restore(stream("shuffled").save())
