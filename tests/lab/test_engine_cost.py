"""An engine's cost: the fit recovers it from noisy ticks and from the timelines of a run."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april_rl.lab.report.recorded_run import read_cost
from april_rl.lab.simulator.engine_cost import MIN_TICKS, EngineCost, EngineWork, fit_cost
from april_rl.lab.simulator.recorded_lengths import RecordingError
from april_rl.run.tracking.samples_file import write_timeline
from april_rl.training.rollout.measures.timeline import Timeline
from april_rl.training.rollout.ticks import TickWork

COST = EngineCost(step_s=3e-3, sample_s=4e-5, context_token_s=6e-8, prefill_token_s=2e-5)


def tick(
    elapsed_s: float, *, steps: int = 8, samples: int = 1, context: int = 0, prefill: int = 0
) -> TickWork:
    """Return the work of a tick with `samples` in flight that hold `context` tokens."""
    return TickWork(steps, steps * samples, steps * context, prefill, elapsed_s)


def seconds(work: TickWork, cost: EngineCost = COST) -> float:
    return cost.seconds(EngineWork(*work[:-1]))


def ticks_of_a_run(*, noise: float, held_up: float, seed: int = 0) -> list[TickWork]:
    """Return 300 ticks of varied work with relative noise; a share of them takes 2.5 times as
    long.
    """
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
        ticks.append(work._replace(elapsed_s=elapsed_s))
    return ticks


@pytest.mark.parametrize("held_up", [0.0, 0.2])
def test_the_fit_recovers_the_cost_from_noisy_and_delayed_ticks(held_up):
    """Fails when a column is scaled twice, or ticks are not reweighted: the delayed fifth of them
    then raises terms by a tenth.
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
    found = fit_cost([tick(s, samples=n, context=c, prefill=p) for s, n, c, p in work])
    terms = (found.step_s, found.sample_s, found.context_token_s, found.prefill_token_s)
    assert min(terms) >= 0
    assert np.isfinite(terms).all()


def test_the_fit_predicts_ticks_of_a_constant_batch_size():
    """Fails when proportional columns make the normal equations singular."""
    rng = np.random.default_rng(1)
    works = [tick(0.0, samples=64, context=64 * int(rng.integers(100, 900))) for _ in range(50)]
    ticks = [work._replace(elapsed_s=seconds(work)) for work in works]
    found = fit_cost(ticks)
    assert [seconds(t, found) for t in ticks] == pytest.approx([t.elapsed_s for t in ticks])


def write_ticks(run_dir: Path, step: int, ticks: Sequence[TickWork]) -> None:
    timeline = Timeline(
        policy_version=0, time_s=1.0, stop_s=0.0, slots={}, stays=(), acts=(), ticks=tuple(ticks)
    )
    write_timeline(run_dir / "timeline", step, timeline.plain())


def slower(ticks: Sequence[TickWork], times: float) -> list[TickWork]:
    return [work._replace(elapsed_s=times * work.elapsed_s) for work in ticks]


@pytest.mark.parametrize(("num_files", "expected"), [(None, 2.0), (1, 1.0)])
def test_the_cost_of_a_run_comes_from_its_later_half(tmp_path, num_files, expected):
    """Fails when the first steps count, in which caches are cold."""
    ticks = ticks_of_a_run(noise=0.0, held_up=0.0)
    for step, times in ((1, 9.0), (10, 9.0), (20, 2.0), (30, expected)):
        write_ticks(tmp_path, step, slower(ticks, times))
    found = read_cost(tmp_path, num_files=num_files)
    assert found.step_s == pytest.approx(expected * COST.step_s, rel=0.01)


def test_earlier_steps_count_when_the_later_ones_have_too_few_ticks(tmp_path):
    """This happens in a run whose last steps found their groups ready. Fails when only the later
    half counts.
    """
    ticks = ticks_of_a_run(noise=0.0, held_up=0.0)
    write_ticks(tmp_path, 1, slower(ticks, 9.0))
    write_ticks(tmp_path, 10, ticks)
    for step in (20, 30, 31):
        write_ticks(tmp_path, step, ticks[:1])
    assert read_cost(tmp_path).step_s == pytest.approx(COST.step_s, rel=0.01)


def test_the_cost_of_a_run_adds_up_to_what_its_ticks_took(tmp_path):
    """The fit leaves out ticks that were held up; a step of the run has them all the same."""
    ticks = ticks_of_a_run(noise=0.02, held_up=0.1)
    write_ticks(tmp_path, 1, ticks)
    found = read_cost(tmp_path)
    took_s = sum(work.elapsed_s for work in ticks)
    assert sum(seconds(work, found) for work in ticks) == pytest.approx(took_s)
    assert found.step_s > 1.05 * fit_cost(ticks).step_s


def test_a_run_without_timelines_or_ticks_is_refused_with_what_to_set(tmp_path):
    """Fails when either ends in a traceback or is replaced by a guess."""
    with pytest.raises(RecordingError, match=r"no timeline .* tracking\.save_samples_every=1"):
        read_cost(tmp_path)
    idle = [tick(1e-5, steps=0)] * 20  # does not count
    write_ticks(tmp_path, 1, [*idle, *ticks_of_a_run(noise=0.0, held_up=0.0)[:7]])
    with pytest.raises(RecordingError, match=r"at least 8 ticks .* got 7\. .* tracking\.save_s"):
        read_cost(tmp_path)
