"""The engine: real vLLM on small random models, together with a learner's process group."""

import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_engine import request_of, small_engine
from tiny_models import EOS_ID, write_tiny_qwen3
from transformers import AutoModelForCausalLM, PreTrainedModel

from april_rl.training.engine.vllm_engine import VllmEngine
from april_rl.training.rollout.requests import Request, Sampling
from april_rl.types import Completion, Prompt, Sample, SampleId

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]

TEMPERATURE = 0.7
MAX_MODEL_LEN = 192
BUDGET = 24


def build(path: Path) -> VllmEngine:
    return small_engine(
        path,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        args={"max_num_batched_tokens": 32},  # longer prompts are prefilled in parts
        temperature=TEMPERATURE,
    )


@pytest.fixture(scope="module")
def learner_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, tied, seed in [
        ("tied", True, 0),
        ("tied_later", True, 1),
        ("untied", False, 0),
        ("untied_later", False, 1),
    ]:
        write_tiny_qwen3(root / name, tied=tied, seed=seed)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def engines(learner_group: None, folders: dict[str, Path]) -> dict[str, VllmEngine]:  # noqa: ARG001
    return {kind: build(folders[kind]) for kind in ("tied", "untied")}


@pytest.fixture
def engine(engines: dict[str, VllmEngine]) -> Iterator[VllmEngine]:
    yield engines["tied"]
    engines["tied"].abort()


def prompt_ids(index: int, length: int = 6) -> tuple[int, ...]:
    return tuple(3 + (7 * index + 5 * i) % 90 for i in range(length))


def request(index: int, *, max_tokens: int = BUDGET, length: int = 6) -> Request:
    return request_of(index, prompt_ids(index, length), budget=max_tokens, seed=1000 + index)


def finish(engine: VllmEngine, requests: list[Request], *, slots: int = 16) -> list[Completion]:
    """Return all samples, in the order of their index."""
    tick = engine.advance(requests, slots=slots, max_steps=10_000)
    assert len(tick.finished) == len(requests)
    return sorted(tick.finished, key=lambda completion: completion.sample_id)


def reference_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]
) -> torch.Tensor:
    """Return the float32 log-probabilities [R] of the response at the sampling temperature."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


def mean_mismatch(folder: Path, completions: list[Completion], length: int = 6) -> float:
    """Return the mean of |engine - transformers| in nats over all tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    differences = [
        reference_logprobs(model, prompt_ids(c.sample_id.prompt_id, length), c.token_ids)
        - torch.tensor(c.logprobs)
        for c in completions
    ]
    return torch.cat(differences).abs().mean().item()


def weights(folder: Path, *, tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, value in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            yield name, value


def test_behaviour_logprobs_match_the_model_at_the_sampling_temperature(
    engine: VllmEngine, folders: dict[str, Path]
) -> None:
    completions = finish(engine, [request(i) for i in range(32)])
    assert len(completions) == 32
    assert mean_mismatch(folders["tied"], completions) < 0.02


def test_completions_are_arrays_of_their_exact_length(engine: VllmEngine) -> None:
    """For finished and aborted ones: twelve bytes per token. Fails when they are tuples, or the
    larger arrays that grew with them.
    """
    tick = engine.advance([request(i, max_tokens=20 + i) for i in range(8)], slots=8, max_steps=23)
    aborted = engine.abort()
    assert tick.finished
    assert aborted
    for completion in (*tick.finished, *aborted):
        for held, code in ((completion.token_ids, "i"), (completion.logprobs, "d")):
            assert isinstance(held, array)
            assert held.typecode == code
            assert sys.getsizeof(held) == sys.getsizeof(held[:])


def test_long_prompts_are_prefilled_in_parts_and_once(
    engine: VllmEngine, folders: dict[str, Path]
) -> None:
    requests = [request(i, length=100) for i in range(8)]
    tick = engine.advance(requests, slots=8, max_steps=10_000)
    assert tick.prefilled_tokens == 800
    again = engine.advance(requests, slots=8, max_steps=10_000)
    assert again.prefilled_tokens == 8 * (100 - 96)  # the prefix cache has whole blocks of 32
    assert mean_mismatch(folders["tied"], list(tick.finished), 100) < 0.02


def test_a_response_ends_with_the_end_token_or_at_its_budget(engine: VllmEngine) -> None:
    completions = finish(engine, [request(i, max_tokens=60) for i in range(32)])
    for completion in completions:
        ended = completion.token_ids[-1] == EOS_ID
        assert completion.finish_reason == ("stop" if ended else "length")
        assert EOS_ID not in completion.token_ids[:-1]
        assert ended or len(completion.token_ids) == 60
    assert {c.finish_reason for c in completions} == {"stop", "length"}


def test_aborted_and_resumed_samples_get_every_token_once_and_one_budget(
    engine: VllmEngine, folders: dict[str, Path]
) -> None:
    samples = {
        SampleId(i, 0): Sample(
            prompt=Prompt(id=i, token_ids=prompt_ids(i), text="", answer="", source=""), index=0
        )
        for i in range(8)
    }
    generated = 0
    while unfinished := [s for s in samples.values() if not s.is_finished]:
        resumed = [
            Request(
                sample_id=s.id,
                prompt_token_ids=s.prompt.token_ids,
                parts=tuple(completion.token_ids for completion in s.completions),
                start=s.num_tokens,
                max_tokens=BUDGET - s.num_tokens,
                seed=7 * s.prompt.id + s.num_tokens,
            )
            for s in unfinished
        ]
        tick = engine.advance(resumed, slots=5, max_steps=5)
        generated += tick.generated_tokens
        for completion in (*tick.finished, *engine.abort()):
            samples[completion.sample_id] = samples[completion.sample_id].with_span(completion)
    assert max(len(s.completions) for s in samples.values()) > 3
    assert generated == sum(s.num_tokens for s in samples.values())
    model = AutoModelForCausalLM.from_pretrained(folders["tied"], dtype=torch.float32)
    for sample in samples.values():
        assert sample.num_tokens == BUDGET or sample.token_ids[-1] == EOS_ID
        logprobs = reference_logprobs(model, sample.prompt.token_ids, sample.token_ids)
        difference = logprobs - torch.tensor(sample.behaviour_logprobs)
        assert difference.abs().mean() < 0.05


def test_abort_returns_every_running_and_queued_request_once(engine: VllmEngine) -> None:
    tick = engine.advance([request(i) for i in range(10)], slots=4, max_steps=3)
    aborted = engine.abort()
    returned = [c.sample_id.prompt_id for c in (*tick.finished, *aborted)]
    assert sorted(returned) == list(range(10))
    assert all(c.finish_reason is None for c in aborted)
    lengths = [len(c.token_ids) for c in aborted]
    assert 0 < sum(map(bool, lengths)) <= 4
    assert engine.abort() == ()
    assert engine.advance([], slots=4, max_steps=5).engine_steps == 0


def test_slots_are_never_exceeded_and_refilled_between_steps(engine: VllmEngine) -> None:
    requests = [request(i, max_tokens=1) for i in range(12)]
    tick = engine.advance(requests, slots=3, max_steps=10_000)
    assert (tick.engine_steps, tick.slot_steps, len(tick.finished)) == (4, 12, 12)
    assert [c.sample_id.prompt_id for c in tick.finished] == list(range(12))
    engine.advance([request(i) for i in range(12)], slots=3, max_steps=2)
    assert sum(bool(completion.token_ids) for completion in engine.abort()) == 3


def test_the_same_seeds_give_the_same_tokens_and_other_seeds_do_not(engine: VllmEngine) -> None:
    first = finish(engine, [request(i) for i in range(8)])
    assert finish(engine, [request(i) for i in range(8)]) == first
    other = [request(i)._replace(seed=i) for i in range(8)]
    assert [c.token_ids for c in finish(engine, other)] != [c.token_ids for c in first]


def test_each_request_is_sampled_with_its_own_temperature_and_top_p(engine: VllmEngine) -> None:
    """A tiny nucleus is greedy: the probability of each token is 1. Fails when all requests are
    sampled at the engine's own temperature, or later ones at the wrong temperature.
    """
    before = finish(engine, [request(i) for i in range(8)])
    tiny, cold = Sampling(TEMPERATURE, top_p=1e-6), Sampling(0.001, top_p=1.0)
    greedy, coldest = (
        finish(engine, [request(i)._replace(sampling=sampling) for i in range(8)])
        for sampling in (tiny, cold)
    )
    assert all(logprob == 0 for completion in greedy for logprob in completion.logprobs)
    same = [a.token_ids == b.token_ids for a, b in zip(greedy, coldest, strict=True)]
    assert sum(same) >= 6  # in bfloat16 the two best tokens may have equal probability
    assert finish(engine, [request(i) for i in range(8)]) == before != greedy


def test_a_request_that_cannot_fit_ends_with_an_engine_error(engine: VllmEngine) -> None:
    """Fails when it raises an exception, which would end the run, or when other requests fail as
    well.
    """
    wrong = [request(7, max_tokens=MAX_MODEL_LEN - 5), request(8, max_tokens=-5)]
    completions = finish(engine, [request(0), *wrong, request(1)])
    reasons = {c.sample_id.prompt_id: c.finish_reason for c in completions}
    assert reasons.pop(7) == reasons.pop(8) == "engine_error"
    assert set(reasons) == {0, 1}
    assert "engine_error" not in reasons.values()


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_new_weights_reach_every_layer(
    kind: str, engines: dict[str, VllmEngine], folders: dict[str, Path]
) -> None:
    engine, later = engines[kind], folders[f"{kind}_later"]
    length = 100  # the prefix cache holds most of the prompts, computed with the old weights
    requests = [request(i, length=length) for i in range(16)]
    assert mean_mismatch(later, finish(engine, requests), length) > 0.5  # not yet
    engine.load_weights(weights(later, tied=kind == "tied"), policy_version=3)
    completions = finish(engine, requests)
    assert {c.policy_version for c in completions} == {engine.policy_version} == {3}
    assert mean_mismatch(later, completions, length) < 0.02
    engine.load_weights(weights(folders[kind], tied=kind == "tied"), policy_version=4)
    assert mean_mismatch(folders[kind], finish(engine, requests), length) < 0.02


def test_weights_are_not_loaded_while_requests_run(
    engine: VllmEngine, folders: dict[str, Path]
) -> None:
    engine.advance([request(0)], slots=1, max_steps=1)
    with pytest.raises(AssertionError, match="abort first"):
        engine.load_weights(weights(folders["tied"], tied=True), policy_version=9)
    assert engine.abort()[0].policy_version == engine.policy_version != 9


@pytest.mark.usefixtures("engines")
def test_the_engine_does_not_touch_the_learners_process_group() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert (total.item(), dist.get_world_size()) == (1.0, 1)
