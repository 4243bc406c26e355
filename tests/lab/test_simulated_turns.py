"""Simulated samples with several turns and tools that take time."""

from dataclasses import replace

import pytest
from composed_config import load
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_models import sizes_of
from shapes import shape_by_name

from april_rl.lab.price.assumptions import Assumptions
from april_rl.lab.price.memory import real_memory
from april_rl.lab.price.prediction import StepPrice, step_prices, work_of
from april_rl.lab.simulator.engine_cost import EngineCost
from april_rl.lab.simulator.gpu_kinds import GPU_KINDS
from april_rl.lab.simulator.length_distributions import Lognormal
from april_rl.lab.simulator.outcome import Outcome
from april_rl.lab.simulator.prediction import SYNCHRONOUS
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.lab.simulator.turns import Turns
from april_rl.start.planning.facts import Models
from april_rl.start.planning.memory_inputs import Beside
from april_rl.training.rollout.collector import Collection
from april_rl.types import Completion, Observation, Sample

H100 = GPU_KINDS["h100"]
TAIL = Lognormal(median_tokens=150, sigma=0.8, correlation=0.3)
SMALL = Scenario(
    cost=EngineCost(step_s=5e-3, sample_s=2e-5, context_token_s=6e-8, prefill_token_s=2e-5),
    length_of=TAIL,
    num_groups=8,
    group_size=4,
    max_response_tokens=600,
    prompt_tokens=16,
    num_engines=2,
)
SLOW = Turns(num_turns=4, observation_tokens=10, tool_s=0.5, tool_sigma=0.5)
quick = settings(max_examples=15, deadline=None)


def run(scenario: Scenario, factor: float, *, refill: bool) -> tuple[Outcome, list[Collection]]:
    seen: list[Collection] = []
    outcome = simulate(
        scenario,
        over_sampling_factor=factor,
        refill=refill,
        num_steps=10,
        warmup_steps=6,
        on_step=lambda _, collection: seen.append(collection),
    )
    return outcome, seen


def turns_of(sample: Sample) -> list[int]:
    turns = [0]
    for span in sample.spans[1:]:
        if isinstance(span, Completion):
            turns[-1] += len(span.token_ids)
        elif not span.is_final:
            turns.append(0)
    return turns


def test_one_turn_and_a_tool_without_latency_equal_the_simulation_without_turns():
    """Bit-identical for the synchronous loop. With refill, a group starts one tick later, after its
    environment has started. Fails when an environment costs extra time.
    """
    one = replace(SMALL, turns=Turns(num_turns=1))
    assert run(one, 1, refill=False)[0] == run(SMALL, 1, refill=False)[0]
    refilled, plain = (run(scenario, 2, refill=True)[0] for scenario in (one, SMALL))
    assert refilled.step_s == pytest.approx(plain.step_s, rel=0.05)


@quick
@given(
    num_turns=st.integers(1, 6),
    observation_tokens=st.integers(0, 20),
    factor=st.floats(1, 3),
    refill=st.booleans(),
    keeps=st.booleans(),
)
def test_turns_share_the_response_evenly(num_turns, observation_tokens, factor, refill, keeps):
    """Also in parked samples; no turn follows when the response budget is used up. Fails when a
    resumed turn begins again, or an observation counts as sampled.
    """
    turns = Turns(num_turns=num_turns)
    if num_turns > 1:
        turns = replace(SLOW, num_turns=num_turns, observation_tokens=observation_tokens)
    scenario = replace(SMALL, num_groups=3, turns=turns, keeps_parked=keeps)
    for collection in run(scenario, factor, refill=refill)[1]:
        for sample in (s for scored in collection.groups for s in scored.group.samples):
            length, lengths = TAIL(sample.id), turns_of(sample)
            assert sum(lengths) == sample.num_tokens == min(length, 600)
            assert all(abs(tokens - length / num_turns) < 1 for tokens in lengths[:-1])
            assert len(lengths) == min(num_turns, length) or sample.finish_reason == "length"
            calls = [s for s in sample.spans[1:] if isinstance(s, Observation) and not s.is_final]
            assert all(len(call.token_ids) == turns.observation_tokens for call in calls)


def test_a_slow_tool_delays_the_synchronous_loop_and_hardly_over_sampling():
    """Fails when a sample holds its slot while its tool works, or tools work one after
    the other.
    """
    at_once = replace(SMALL, max_staleness=16, turns=replace(SLOW, tool_s=0.0))
    slow = replace(at_once, turns=SLOW)

    def speed_ratio(factor: float, *, refill: bool) -> float:
        speeds = [
            run(scenario, factor, refill=refill)[0].trained_samples_per_s
            for scenario in (slow, at_once)
        ]
        return speeds[0] / speeds[1]

    assert speed_ratio(1, refill=False) < 0.65
    assert speed_ratio(1.5, refill=True) > 0.85


def test_a_turn_prefills_what_its_last_turn_left_uncached():
    """Blocks of 16 tokens. Fails when every turn prefills the whole sample, or nothing."""
    turns = Turns(num_turns=2, observation_tokens=32)
    scenario = replace(SMALL, num_engines=1, num_groups=1, group_size=1, turns=turns)
    _, seen = run(replace(scenario, length_of=lambda _: 200), 1, refill=False)
    prefilled = sum(tick.prefilled_tokens for _, tick in seen[0].record.ticks)
    # The prompt; then prompt, turn and observation without the blocks of the first two, and without
    # the last token, whose keys and values are not computed yet.
    assert prefilled == 16 + (16 + 100 + 32) - (16 + 100 - 1) // 16 * 16


def test_turns_depend_only_on_the_seed():
    """Fails when latencies depend on the machine, or one latency is drawn for all samples and
    turns.
    """
    scenario = replace(SMALL, turns=SLOW)
    first, second = (run(scenario, 2, refill=True)[0] for _ in range(2))
    assert first == second
    assert first != run(replace(scenario, seed=1), 2, refill=True)[0]
    episodes = scenario.episodes
    assert episodes is not None
    samples = [s for g in run(scenario, 2, refill=True)[1][0].groups for s in g.group.samples]
    asked = [Sample(s.prompt, s.index, s.spans[:-1]) for s in samples]
    seconds = {episodes.seconds(sample, Observation(())) for sample in asked}
    assert len(seconds) == len(asked)


@pytest.mark.slow
def test_each_number_of_turns_has_an_effect_on_a_planned_step():
    """Also at a smaller size, in which observations are shorter by the same factor."""
    config = load("+recipe=qwen3_4b_dapo", "algorithm.dynamic_sampling=false")
    memory = real_memory(config, Models(policy=sizes_of("4B"), beside=Beside()), gpu_gib=79.2)

    def price(*given: str) -> StepPrice:
        assumed, _ = Assumptions.of(["mean_response_tokens=3000", *given])
        work = work_of(config, assumed, shape=shape_by_name("4B"))
        return step_prices(memory, work, rates=H100.rates(), modes=[SYNCHRONOUS])[0]

    tool = ("turns=3", "tool_s=20")
    assert "in 3 turns with calls of 20 s" in Assumptions.of(tool)[0].lengths_in_words(config)
    config.environment.function = "rooms:Rooms"
    assert "in one turn (the run has" in Assumptions().lengths_in_words(config)
    plain, quick, slow = price(), price("turns=3"), price(*tool)
    assert plain.rollout_s == pytest.approx(quick.rollout_s, rel=0.05)
    assert slow.rollout_s == pytest.approx(quick.rollout_s + 2 * 20, rel=0.1)
    assert slow.update_s == plain.update_s
    observed = price(*tool, "observation_tokens=5000")
    assert observed.update_s > 2 * slow.update_s
    assert observed.outcome.peak_kv_tokens > 2 * slow.outcome.peak_kv_tokens
    assert price(*tool, "tool_sigma=1.5").rollout_s > 1.5 * slow.rollout_s
    assert price(*tool, "score_s=30").rollout_s == pytest.approx(slow.rollout_s + 30, rel=0.05)
