"""Held-out sets on fake engines and scores: sampling follows the set's settings, missing samples
are an error, and metrics and records are complete.
"""

from dataclasses import replace

import numpy as np
import pytest
from fake_engine import FakeEngines
from fake_outside import CountingScorer, FakeScorer, reward
from rollout_runs import lognormal

from april_rl.config import TrainConfig
from april_rl.config.schema import RolloutConfig
from april_rl.config.task import (
    DataConfig,
    EvaluationConfig,
    EvaluationSetConfig,
    ModelConfig,
    RewardConfig,
    RewardFunctionConfig,
    SourceConfig,
)
from april_rl.errors import RunError
from april_rl.start.assembly.evaluation import held_out_sets
from april_rl.start.planning.sizes import context_length
from april_rl.task.evaluation.evaluate import evaluate
from april_rl.task.evaluation.evaluator import Evaluator
from april_rl.task.evaluation.figures import set_report
from april_rl.task.evaluation.held_out import EvaluationError, HeldOut, ScoredSet
from april_rl.task.evaluation.settings import SetSampling, longest_response, set_sampling
from april_rl.training.rollout.requests import Sampling, request_seed
from april_rl.training.rollout.ticks import Completions
from april_rl.types import Observation, Prompt, Sample, SampleId

BUDGET, NUM_PROMPTS, K = 40, 4, 3
LENGTH_OF = lognormal(9, 0.9)
HELD_OUT = HeldOut(
    name="sums",
    path="sums",
    prompts=[
        Prompt(id=i, token_ids=(i,) * (1 + i), text=f"p{i}", answer=f"a{i}", source=f"sums:{i}")
        for i in range(NUM_PROMPTS)
    ],
    sampling=SetSampling(
        num_samples=K, temperature=1.0, top_p=1.0, max_response_tokens=BUDGET, max_prompts=None
    ),
    function="exact",
    answer_of=lambda _, response: response.split()[0],
)
IDS = [SampleId(-1 - i, index) for i in range(NUM_PROMPTS) for index in range(K)]


class LosingEngines(FakeEngines):
    """An engine that never returns one of the samples but counts it as finished."""

    def wait(self, timeout_s: float, *, gather_s: float = 0.0):
        return [
            (engine, replace(tick, finished=Again(tick.finished)))
            for engine, tick in super().wait(timeout_s, gather_s=gather_s)
        ]


class Again(Completions):
    """Engine that returns another sample of the prompt instead of the last completion."""

    def __iter__(self):
        for completion in super().__iter__():
            sample_id = completion.sample_id
            is_lost = sample_id == IDS[-1]
            yield replace(completion, sample_id=IDS[-2]) if is_lost else completion


def evaluator(engines: FakeEngines, scorer: FakeScorer, **settings) -> Evaluator:
    known = {"temperature": 1.0, "num_slots": 5, "tick_steps": 4, "tick_timeout_s": 1.0, "seed": 11}
    return Evaluator(engines, scorer, **known | settings)


def run(scorer: FakeScorer | None = None, *, held_out: HeldOut = HELD_OUT, **settings):
    engines = FakeEngines(LENGTH_OF, num_engines=2, budget=BUDGET)
    return evaluate(
        held_out,
        evaluator(engines, scorer or CountingScorer(), **settings),
        decode=lambda tokens: " ".join(map(str, tokens)),
        on_progress=lambda _: None,
    )


@pytest.mark.parametrize(("end", "is_open"), [("", False), ("<think>\n", True)])
def test_a_response_in_thoughts_that_its_prompt_began_has_no_answer(end: str, is_open) -> None:
    prompts = [replace(prompt, text=prompt.text + end) for prompt in HELD_OUT.prompts]
    config = configure(EvaluationSetConfig(path="aime"))
    read = the_set(replace(config, reward=RewardConfig(function="last_number"))).answer_of
    found = run(held_out=replace(HELD_OUT, prompts=prompts, answer_of=read))
    assert {record.stated is None for record in found.records} == {is_open}


@pytest.mark.parametrize("num_slots", [2, 5, 100])
def test_every_held_out_sample_is_requested_once_with_its_own_seed(num_slots):
    """Fails when samples of a prompt that are sent separately get each other's index, seed or
    reward, one is sent twice, or an engine computes more than its share.
    """
    engines = FakeEngines(LENGTH_OF, num_engines=2, budget=BUDGET)
    most_held = 0

    def look(*_: object) -> None:
        nonlocal most_held
        most_held = max(most_held, *(len(engine.running) for engine in engines.each))

    for engine in engines.each:
        engine.on_step = look
    done: list[int] = []
    outcome = evaluator(engines, CountingScorer(), num_slots=num_slots).run(HELD_OUT, done.append)
    requests = [request for engine in engines.each for request in engine.requests]
    assert sorted(request.sample_id for request in requests) == sorted(IDS)
    for request in requests:
        assert request.seed == request_seed(11, request.sample_id, 0)
        assert len(request.prompt_token_ids) == -request.sample_id.prompt_id
        assert (request.start, request.max_tokens, request.sampling) == (0, BUDGET, None)
    assert most_held <= -(-num_slots // 2)
    assert done == sorted(done)
    assert done[-1] == 12
    assert [sample.id for sample in outcome.samples] == IDS
    assert [sample.num_tokens for sample in outcome.samples] == [
        min(LENGTH_OF(i), BUDGET) for i in IDS
    ]
    assert outcome.rewards.ravel().tolist() == [*map(reward, IDS)]


def test_an_evaluation_does_not_touch_parked_samples_of_training(monkeypatch) -> None:
    """Fails when it ends with an abort, after which an engine forgets the caches of parked samples,
    or with ticks in progress, which the next step would treat as its own.
    """
    engines = FakeEngines(LENGTH_OF, num_engines=2, budget=BUDGET)
    monkeypatch.setattr(engines, "abort", lambda _: pytest.fail("an evaluation aborts"))
    evaluator(engines, CountingScorer()).run(HELD_OUT, lambda _: None)
    assert engines.under_way == [0, 0]


def test_a_set_is_sampled_with_its_own_temperature_and_top_p() -> None:
    engines = FakeEngines(LENGTH_OF, num_engines=1, budget=BUDGET)
    aime = replace(HELD_OUT, sampling=replace(HELD_OUT.sampling, temperature=0.6, top_p=0.95))
    evaluator(engines, CountingScorer()).run(aime, lambda _: None)
    assert {request.sampling for request in engines.each[0].requests} == {Sampling(0.6, 0.95)}


def test_a_missing_sample_is_an_error_and_not_a_zero() -> None:
    """lighteval #771: AIME24 fell from 0.47 to 0.22 because of samples that vLLM left out."""
    engines = LosingEngines(LENGTH_OF, num_engines=1, budget=BUDGET)
    with pytest.raises(
        EvaluationError, match=r"sums: the engines did not return all 3 .* at sums:3"
    ):
        evaluator(engines, CountingScorer()).run(HELD_OUT, lambda _: None)


def test_the_metrics_match_the_records() -> None:
    found = run()
    rewards = np.array([record.reward for record in found.records]).reshape(NUM_PROMPTS, K)
    values = found.report.metrics("sums").read()
    assert values["eval/sums/avg_at_k"] == pytest.approx(rewards.mean())
    assert values["eval/sums/avg_at_k_low"] < rewards.mean() < values["eval/sums/avg_at_k_high"]
    assert values["eval/sums/pass_at_k"] == (rewards > 0.5).any(axis=1).mean()
    assert values["eval/sums/errors"] == values["eval/sums/left_out_prompts"] == 0
    tokens = [record.num_tokens for record in found.records]
    assert values["eval/sums/response_tokens_mean"] == pytest.approx(np.mean(tokens))
    for record, sample_id in zip(found.records, IDS, strict=True):
        place = -1 - sample_id.prompt_id
        assert (record.prompt_id, record.index) == (place, sample_id.index)
        assert (record.prompt, record.answer, record.source) == (
            f"p{place}",
            f"a{place}",
            f"sums:{place}",
        )
        assert record.num_tokens == len(record.response.split())
        assert record.stated == record.response.split()[0]
        assert record.finish_reason == ("length" if LENGTH_OF(sample_id) > BUDGET else "stop")


def test_a_failed_reward_excludes_its_prompt_and_does_not_count_as_zero() -> None:
    """The first sample of the second prompt fails. Fails when it counts as wrong, or is not
    reported.
    """
    found = run(CountingScorer(failing={-2}))
    kept = [reward(sample_id) for sample_id in IDS if sample_id.prompt_id != -2]
    values = found.report.metrics("sums").read()
    assert values["eval/sums/avg_at_k"] == pytest.approx(np.mean(kept))
    assert (values["eval/sums/errors"], values["eval/sums/left_out_prompts"]) == (1, 1)
    assert [prompt.source for prompt in found.report.prompts] == ["sums:0", "sums:2", "sums:3"]
    assert [record.reward for record in found.records].count(None) == 1


def test_a_set_without_a_scored_prompt_ends_in_one_message() -> None:
    with pytest.raises(EvaluationError, match=r"sums: each of its 4 prompts .*\(4 of 12 samples"):
        run(CountingScorer(failing={-1, -2, -3, -4}))


def test_an_evaluation_quotes_the_error_of_a_failed_environment() -> None:
    end = Observation((), is_final=True, failure="KeyError: 'a column'")
    samples = (Sample(replace(HELD_OUT.prompts[0], has_environment=True), 0, (end,)),)
    rewards = np.full((1, 1), np.nan)
    outcome = ScoredSet(held_out=HELD_OUT, samples=samples, rewards=rewards)
    with pytest.raises(EvaluationError, match=r"1 samples failed.*KeyError: 'a column'"):
        set_report(outcome, None)


def test_evaluation_function_selects_the_reward_function_that_decides() -> None:
    scorer = CountingScorer()
    scorer.parts = ("format", "math")
    found = run(scorer, held_out=replace(HELD_OUT, function="math"))
    assert found.records[0].reward == reward(IDS[0]) + 100


def configure(chosen: EvaluationSetConfig, **evaluation) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(path="model"),
        data=DataConfig(path="data"),
        rollout=RolloutConfig(max_response_tokens=300, temperature=0.8),
        evaluation=EvaluationConfig(sets={"aime": chosen}, **evaluation),
    )


def test_an_evaluation_set_inherits_from_evaluation_and_then_from_rollout() -> None:
    bare = EvaluationSetConfig(path="aime")
    config = configure(bare)
    assert set_sampling(config, bare) == SetSampling(
        num_samples=1, temperature=0.8, top_p=1.0, max_response_tokens=300, max_prompts=None
    )
    config = configure(
        bare, num_samples=4, temperature=0.7, top_p=0.9, max_response_tokens=400, max_prompts=5
    )
    assert set_sampling(config, bare) == SetSampling(
        num_samples=4, temperature=0.7, top_p=0.9, max_response_tokens=400, max_prompts=5
    )
    assert longest_response(config, is_training=True) == (400, "evaluation.max_response_tokens")
    own = EvaluationSetConfig(
        path="aime",
        num_samples=32,
        temperature=0.6,
        top_p=0.95,
        max_response_tokens=500,
        max_prompts="all",
    )
    config = configure(own, num_samples=4, max_response_tokens=400, max_prompts=5)
    assert set_sampling(config, own) == SetSampling(
        num_samples=32, temperature=0.6, top_p=0.95, max_response_tokens=500, max_prompts=None
    )
    assert longest_response(config, is_training=True) == (
        500,
        "evaluation.sets.aime.max_response_tokens",
    )


def test_a_context_that_is_too_short_only_for_an_evaluation_is_refused() -> None:
    config = configure(EvaluationSetConfig(path="aime", max_response_tokens=500))
    assert context_length(config)[0] == 1524
    assert context_length(configure(EvaluationSetConfig(path="aime")))[0] == 1324
    short = configure(EvaluationSetConfig(path="aime", max_response_tokens=5))
    assert context_length(short)[0] == 1324
    assert context_length(short, is_training=False)[0] == 1029
    config = replace(config, engine=replace(config.engine, max_model_len=1400))
    with pytest.raises(RunError, match=r"evaluation.sets.aime.max_response_tokens = 1524, got"):
        context_length(config)


def the_set(config: TrainConfig) -> HeldOut:
    return held_out_sets(config, lambda **_: [])["aime"]


@pytest.mark.parametrize(
    ("function", "response", "answer"),
    [
        ("math_verify", "so \\boxed{ 1 000 }", "1000"),
        ("math_verify", "it is 7", None),
        ("last_number", "it is 7", "7"),
        ("last_number", "1 or 2: \\boxed{x=3}", "3"),
        ("last_number", "nothing", None),
        ("my:own", "\\boxed{7}", "7"),
    ],
)
def test_samples_vote_with_the_answers_that_the_reward_reads(function, response, answer) -> None:
    config = configure(EvaluationSetConfig(path="aime"))
    read = the_set(replace(config, reward=RewardConfig(function=function))).answer_of
    assert read is not None
    assert read("", response) == answer


def test_the_first_function_that_scores_the_set_decides() -> None:
    """There is no vote where the function reads no answer, for example from a program. Fails when a
    function decides that gives the set no value.
    """
    config = configure(EvaluationSetConfig(path="aime"))
    functions = {
        "form": RewardFunctionConfig(function="format"),
        "math": RewardFunctionConfig(function="math_verify", sources=["aime"]),
    }
    config = replace(config, reward=RewardConfig(functions=functions))
    assert (the_set(config).function, the_set(config).answer_of) == ("form", None)
    sources = {"web": SourceConfig(path="web")}
    mixture = replace(config, data=DataConfig(path="", sources=sources))
    functions["form"].sources = ["web"]
    assert the_set(mixture).function == "math"
    assert the_set(mixture).answer_of is not None
