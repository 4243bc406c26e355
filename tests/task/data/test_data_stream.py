"""The stream of prompts: every prompt once per epoch, sources in their shares, exact resumption."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april_rl.errors import DataError
from april_rl.task.data.stream import MixedStream, PromptStream
from april_rl.training.rollout.measures.reward_metrics import reward_metrics
from april_rl.types import Group, Prompt, ScoredGroup


def prompts_of(count, name=""):
    return [
        Prompt(id=i, token_ids=(i,), text=str(i), answer="", source=f"f:{i}", dataset=name)
        for i in range(count)
    ]


def stream(num_prompts, seed=0):
    return PromptStream(prompts_of(num_prompts), seed=seed)


def take(source, count):
    return [source.take() for _ in range(count)]


@given(st.integers(1, 40), st.integers(0, 2**40))
def test_every_epoch_has_every_prompt_once_and_ids_count_up(num_prompts, seed):
    prompts = take(stream(num_prompts, seed), 3 * num_prompts)
    assert [p.id for p in prompts] == list(range(3 * num_prompts))
    for epoch in range(3):
        part = prompts[epoch * num_prompts : (epoch + 1) * num_prompts]
        assert sorted(p.text for p in part) == sorted(str(i) for i in range(num_prompts))


def test_every_epoch_and_every_seed_has_a_different_order():
    epochs = [[p.text for p in take(stream(50, seed), 100)] for seed in (0, 1)]
    orders = [texts[start : start + 50] for texts in epochs for start in (0, 50)]
    assert all(a != b for a, b in pairwise(orders))
    assert orders[0] != sorted(orders[0], key=int)


@given(st.integers(1, 20), st.integers(0, 70), st.integers(0, 100), st.integers(0, 99))
def test_a_restored_stream_continues_exactly(num_prompts, before, elsewhere, seed):
    source = stream(num_prompts, seed)
    take(source, before)
    state = source.save()
    other = stream(num_prompts, seed)
    take(other, elsewhere)
    other.restore(state)
    assert take(other, 45) == take(source, 45)


def test_the_order_of_a_seed_never_changes():
    assert "".join(p.text for p in take(stream(8, seed=7), 8)) == "43621057"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"seed": 5}, "seed=0 is not"), ({"num_prompts": 4}, "data.path= gives")],
)
def test_a_state_of_another_stream_is_refused(changes, expected):
    with pytest.raises(DataError, match=expected):
        stream(3).restore(stream(3).save() | changes)


def mixture(sizes, weights, seed=3):
    streams = {n: PromptStream(prompts_of(k, n), seed=seed, name=n) for n, k in sizes.items()}
    return MixedStream(streams, weights)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.05, 20)), min_size=2, max_size=5))
def test_every_source_has_its_share_of_any_number_of_prompts(chosen):
    sizes = {f"s{i}": size for i, (size, _) in enumerate(chosen)}
    weights = {f"s{i}": weight for i, (_, weight) in enumerate(chosen)}
    prompts = take(mixture(sizes, weights), 300)
    assert [p.id for p in prompts] == list(range(300))
    for num in (60, 150, 300):
        for name, weight in weights.items():
            share = num * weight / sum(weights.values())
            given_out = sum(p.dataset == name for p in prompts[:num])
            assert abs(given_out - share) <= len(weights)


def test_another_source_does_not_change_the_order_within_a_source():
    def order(*names):
        sizes = dict.fromkeys(names, 20)
        return [
            p.text for p in take(mixture(sizes, dict.fromkeys(names, 1)), 60) if p.dataset == "a"
        ][:20]

    assert order("a", "b") == order("c", "a", "b")
    assert order("a") != [p.text for p in take(mixture({"b": 20}, {"b": 1}), 20)]


@given(st.integers(0, 60), st.integers(0, 60))
def test_a_restored_mixture_continues_exactly(before, elsewhere):
    sizes, weights = {"a": 4, "b": 9}, {"a": 2.5, "b": 1}
    source, other = mixture(sizes, weights), mixture(sizes, weights)
    take(source, before)
    take(other, elsewhere)
    other.restore(source.save())
    assert take(other, 40) == take(source, 40)


def test_a_state_of_another_mixture_is_refused():
    state = mixture({"a": 4, "b": 9}, {"a": 2, "b": 1}).save()
    with pytest.raises(DataError, match=r"weights \{'a': 1, 'b': 1\} and .*\{'a': 2, 'b': 1\}"):
        mixture({"a": 4, "b": 9}, {"a": 1, "b": 1}).restore(state)
    with pytest.raises(DataError, match=r"data\.sources\.b\.path= gives 8 prompts"):
        mixture({"a": 4, "b": 8}, {"a": 2, "b": 1}).restore(state)


def test_a_changed_source_of_a_mixture_is_refused_with_its_path():
    def mixture_of(fingerprint):
        of_b = PromptStream(
            prompts_of(3, "b"), seed=0, name="b", path="b.jsonl", fingerprint=fingerprint
        )
        return MixedStream({"b": of_b}, {"b": 1})

    state = mixture_of("2").save()
    mixture_of("2").restore(state)
    with pytest.raises(DataError, match=r"^data\.sources\.b\.path=b\.jsonl has changed since"):
        mixture_of("3").restore(state)


def scored_group(name, *rewards):
    prompt = Prompt(id=0, token_ids=(1,), text="", answer="", source="f:1", dataset=name)
    return ScoredGroup(group=Group(prompt=prompt, samples=()), rewards=rewards)


def test_each_source_of_a_mixture_has_its_own_metrics():
    groups = [
        scored_group("a", 1.0, 0.0),
        scored_group("b", 0.0, 0.0),
        scored_group("b", 1.0, 0.5, 0.0),
    ]
    metrics = reward_metrics(groups).read()
    assert {key: value for key, value in metrics.items() if key.startswith("source/")} == {
        "source/a/reward_mean": 0.5,
        "source/a/groups": 1,
        "source/a/no_signal_frac": 0.0,
        "source/b/reward_mean": 0.3,
        "source/b/groups": 2,
        "source/b/no_signal_frac": 0.5,
    }


def test_a_single_data_set_has_no_metrics_by_source():
    assert not any("source/" in key for key in reward_metrics([scored_group("", 1.0, 0.0)]))
