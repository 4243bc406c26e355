"""`python -m april_rl profile`: response lengths before training, and the α that they call for."""

import json
import math
from itertools import chain
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from command_line import write_task

from april_rl.__main__ import main
from april_rl.lab.simulator.engine_cost import EngineCost
from april_rl.lab.simulator.length_distributions import Recorded
from april_rl.lab.simulator.prediction import Prediction, modes_of, predict
from april_rl.lab.simulator.profile import Profile, advice
from april_rl.lab.simulator.scaled_down import scale_down
from april_rl.lab.simulator.simulation import Scenario

COST = EngineCost(step_s=2e-3, sample_s=2e-5, context_token_s=1e-8, prefill_token_s=3e-5)
FACTORS = (1.5, 2.0, 3.0)


def profile_of(lengths: np.ndarray, *, truncated: float = 0.0, silent: float = 0.0) -> Profile:
    groups = tuple(tuple(map(int, group)) for group in lengths.reshape(-1, 4))
    return Profile(lengths=groups, truncated_frac=truncated, no_signal_frac=silent)


def predictions_for(profile: Profile, *, max_staleness: int = 8) -> list[Prediction]:
    scenario = Scenario(
        cost=COST,
        length_of=Recorded(groups=profile.lengths),
        num_groups=8,
        group_size=4,
        max_staleness=max_staleness,
    )
    modes = modes_of(FACTORS, refill=True)
    return list(predict(scale_down(scenario), modes, num_steps=12, warmup_steps=6))


def long_tail() -> Profile:
    drawn = np.random.default_rng(0).lognormal(np.log(200), 1.0, 256)
    return profile_of(drawn.clip(1, 4000))


def test_percentiles_and_histogram_describe_the_lengths() -> None:
    profile = profile_of(np.arange(1, 101))
    assert profile.percentiles == {"p50": 51, "p95": 96, "p99": 100, "max": 100}
    lines = profile.histogram()
    shares = [float(line.split()[-1].rstrip("%")) for line in lines]
    assert len(lines) == 12
    assert sum(shares) == pytest.approx(100, abs=0.6)
    assert lines[-1].split()[2] == "100"


def test_a_long_tail_calls_for_over_sampling_and_equal_lengths_do_not() -> None:
    """Fails when the gain is not relative to the synchronous loop, or any α is advised."""
    profile = long_tail()
    found = predictions_for(profile)
    assert [each.mode.name for each in found] == ["synchronous", "refill", "refill", "refill"]
    assert found[0].gain == 1
    line, cap = advice(profile, found, max_staleness=8)
    assert line.startswith("rollout.over_sampling_factor=")
    chosen = float(line.partition("=")[2].partition(":")[0])
    gains = {each.mode.factor: each.gain for each in found[1:]}
    assert gains[chosen] > 1.2
    assert f"{gains[chosen] - 1:+.0%}" in line
    flat = list(chain.from_iterable(profile.lengths))
    free = math.ceil(chosen * max(flat) / fmean(flat))
    assert cap.startswith(f"rollout.max_staleness={free} lets no step wait")
    even = profile_of(np.full(64, 200))
    [line] = advice(even, predictions_for(even), max_staleness=8)
    assert "hardly any tail: rollout.over_sampling_factor=1" in line


def test_with_the_advised_cap_no_step_waits_and_with_a_smaller_one_some_do() -> None:
    profile = long_tail()
    free = profile.waitless_staleness(1.5)
    occupied = {
        cap: predictions_for(profile, max_staleness=cap)[1].outcome.occupancy
        for cap in (free // 6, free)
    }
    assert occupied[free] > 0.95
    assert occupied[free // 6] < 0.75
    found = predictions_for(profile, max_staleness=free)
    assert len(advice(profile, found, max_staleness=free)) == 1


def test_truncated_responses_and_prompts_without_signal_are_reported() -> None:
    profile = profile_of(np.full(64, 200), truncated=0.4, silent=0.25)
    _, cut, silent = advice(profile, predictions_for(profile), max_staleness=8)
    assert cut.startswith("40% of the responses reach rollout.max_response_tokens")
    assert silent.startswith("25% of the prompts have equal rewards")


def test_a_missing_setting_ends_in_one_message_and_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile"]) == 1
    assert capsys.readouterr().err.startswith("error: data.path is not set")
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_is_not_a_number_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "+recipe=tiny_cpu", "--prompts=none"])
    assert "--prompts: must be a number >= 1, got none" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_the_command_profiles_a_mixture_consistently_with_its_samples(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Fails when the figures do not belong to the written samples, a source gets no share, or
    parked samples are prefilled again that the run would keep.
    """
    task = write_task(tmp_path)
    settings = [
        f"model.path={task / 'model'}",
        f"+data.sources.sums={{path: {task / 'sums.jsonl'}, weight: 3}}",
        f"+data.sources.asked={{path: {task / 'sums.jsonl'}, instruction: '?'}}",
        "data.template=plain",
        "data.max_prompt_tokens=16",
        "rollout.group_size=4",
        "rollout.max_response_tokens=24",
        "rollout.max_staleness=2",
        "rollout.tick_steps=2",
        "trainer.num_groups=4",
        "learner.max_tokens=1024",
        "reward.function=reward_functions:even_length",
        "reward.num_processes=1",
        "engine.kv_cache_gib=0.25",
        "runtime.device=cpu",
        "runtime.threads=1",
        f"output={tmp_path / 'out'}",
    ]
    capfd.readouterr()
    assert main(["profile", *settings, "--prompts", "12", "--alpha", "1.5", "2", "4"]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    lengths = []
    for name, num_prompts in (("sums", 9), ("asked", 3)):
        lines = (tmp_path / "out" / "samples" / f"eval_{name}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert len({record["prompt"] for record in records}) == num_prompts
        lengths += [record["num_tokens"] for record in records]
    found = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert sorted(chain.from_iterable(found["lengths"])) == sorted(lengths)
    assert found["percentiles"]["max"] == max(lengths) <= 24
    # α = 4 needs a staleness cap of 3
    assert [row["over_sampling_factor"] for row in found["factors"]] == [1, 1.5, 2]
    # On a CPU the run would keep KV caches (rollout.resume=auto).
    assert all(row["reprefill_per_generated_token"] == 0 for row in found["factors"])
    assert all(line in printed.out for line in found["advice"])
    assert "response tokens of 48 samples of 12 training prompts" in printed.out
