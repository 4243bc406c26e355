"""An engine's cost: the fit recovers it from noisy ticks, and every step records it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april_rl.lab.simulator.length_distributions import Lognormal
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.rollout.collector import Collection
from april_rl.rollout.engine_cost import MIN_TICKS, EngineCost, engine_metrics, fit_cost
from april_rl.rollout.over_sampling import FixedFactor
from april_rl.rollout.rollout_metrics import rollout_metrics
from april_rl.rollout.ticks import Completions, Tick

COST = EngineCost(step_s=3e-3, sample_s=4e-5, context_token_s=6e-8, prefill_token_s=2e-5)


def tick(
    elapsed_s: float, *, steps: int = 8, samples: int = 1, context: int = 0, prefill: int = 0
) -> Tick:
    """Return a tick with `samples` in flight that hold `context` tokens."""
    return Tick(
        finished=Completions(),
        num_running=samples,
        num_queued=0,
        engine_steps=steps,
        slot_steps=steps * samples,
        context_token_steps=steps * context,
        generated_tokens=steps * samples,
        prefilled_tokens=prefill,
        elapsed_s=elapsed_s,
    )


def seconds(work: Tick, cost: EngineCost = COST) -> float:
    """Return the seconds that the tick's work costs."""
    return cost.seconds(
        engine_steps=work.engine_steps,
        slot_steps=work.slot_steps,
        context_token_steps=work.context_token_steps,
        prefilled_tokens=work.prefilled_tokens,
    )


def ticks_of_a_run(*, noise: float, held_up: float, seed: int = 0) -> list[Tick]:
    """300 ticks of varied work, with relative noise; a share of them takes 2.5 times as long."""
    rng = np.random.default_rng(seed)
    ticks = []
    for _ in range(300):
        samples = int(rng.integers(1, 128))
        work = tick(
            0.0,
            samples=samples,
            context=samples * int(rng.integers(50, 4000)),
            prefill=int(rng.integers(0, 4000)) if rng.random() < 0.3 else 0,
        )
        elapsed_s = seconds(work) * (1 + noise * rng.standard_normal())
        elapsed_s *= 2.5 if rng.random() < held_up else 1
        ticks.append(
            tick(
                elapsed_s,
                samples=samples,
                context=work.context_token_steps // 8,
                prefill=work.prefilled_tokens,
            )
        )
    return ticks


@pytest.mark.parametrize("held_up", [0.0, 0.2])
def test_the_fit_recovers_the_cost_from_noisy_and_delayed_ticks(held_up):
    """Fails when a column is scaled twice, or ticks are not reweighted: the fifth that was held
    up then raises terms by a tenth.
    """
    found = fit_cost(ticks_of_a_run(noise=0.03, held_up=held_up))
    for name in ("step_s", "sample_s", "context_token_s", "prefill_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(COST, name), rel=0.03)


WORK = st.lists(
    st.tuples(
        st.floats(1e-4, 1.0), st.integers(1, 64), st.integers(0, 10**5), st.integers(0, 5000)
    ),
    min_size=MIN_TICKS,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(WORK)
def test_fitted_cost_coefficients_are_never_negative(work):
    """Fails when a subset with a negative coefficient may win."""
    found = fit_cost([tick(s, samples=n, context=c, prefill=p) for s, n, c, p in work])
    terms = (found.step_s, found.sample_s, found.context_token_s, found.prefill_token_s)
    assert min(terms) >= 0
    assert np.isfinite(terms).all()


def test_the_fit_predicts_ticks_of_a_constant_batch_size():
    """Fails when proportional columns make the normal equations blow up."""
    rng = np.random.default_rng(1)
    works = [tick(0.0, samples=64, context=64 * int(rng.integers(100, 900))) for _ in range(50)]
    ticks = [
        tick(seconds(work), samples=64, context=work.context_token_steps // 8) for work in works
    ]
    found = fit_cost(ticks)
    assert [seconds(t, found) for t in ticks] == pytest.approx([t.elapsed_s for t in ticks])


def test_too_few_ticks_are_an_error_that_says_how_many_are_needed():
    """Ticks that computed nothing do not count. Fails when they do."""
    idle = [tick(1e-5, steps=0)] * 20
    with pytest.raises(ValueError, match=f"at least {MIN_TICKS} ticks .* got 7"):
        fit_cost([*idle, *ticks_of_a_run(noise=0.0, held_up=0.0)[:7]])


def test_a_step_records_the_cost_of_its_engines():
    """Fails when the metrics are of ticks of another engine's count, or a term is left out."""
    seen: list[dict[str, float]] = []

    def record(_: int, collection: Collection) -> None:
        read = rollout_metrics(collection.record, num_needed=32).read()
        seen.append({**read, **engine_metrics([tick for _, tick in collection.record.ticks])})

    scenario = Scenario(
        cost=COST,
        length_of=Lognormal(median_tokens=60, sigma=0.8),
        num_groups=8,
        group_size=4,
        max_response_tokens=400,
        prompt_tokens=20,
        num_engines=2,
    )
    simulate(
        scenario,
        over_sampling=FixedFactor(1.0),
        refill=False,
        num_steps=2,
        warmup_steps=0,
        on_step=record,
    )
    for metrics in seen:
        assert metrics["engine/step_s"] == pytest.approx(COST.step_s, rel=0.01)
        assert metrics["engine/sample_s"] == pytest.approx(COST.sample_s, rel=0.01)
        assert metrics["engine/context_token_s"] == pytest.approx(COST.context_token_s, rel=0.05)
        assert metrics["engine/prefill_token_s"] == pytest.approx(COST.prefill_token_s, rel=0.01)
        assert 0.5 * metrics["rollout/time_s"] < metrics["rollout/engine_s"]
        assert metrics["rollout/engine_s"] <= metrics["rollout/time_s"]
        assert metrics["rollout/prompt_tokens_mean"] == 20
