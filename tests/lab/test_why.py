"""`python -m april_rl why`: what left its band first, and what a replay says about the reason."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from planted_faults import FAULTS, HEALTHY, Fault, planted_run, train, write_data

from april_rl.__main__ import main
from april_rl.lab.report.bands import departure_line, departures


def rows_of(metrics: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """Return the rows of a run with these metrics from step 1 on."""
    num = max(map(len, metrics.values()))
    return [{"step": n + 1, **{key: each[n] for key, each in metrics.items()}} for n in range(num)]


def wave(num: int, low: float, high: float) -> list[float]:
    return [low + (high - low) * (7 * n % 10) / 9 for n in range(num)]


def test_a_metric_leaves_the_band_of_its_own_past_and_takes_others_along() -> None:
    norm, kl, reward = wave(40, 0.1, 0.2), wave(40, 0.001, 0.002), wave(40, 0.4, 0.6)
    norm[25:] = [3.0] * 15
    kl[27:] = [0.9] * 13
    reward[28:] = [0.0] * 12
    rows = rows_of({"loss/grad_norm": norm, "loss/behaviour_kl": kl, "reward/mean": reward})
    found = departures(rows)
    assert [(each.key, each.step) for each in found] == [
        ("loss/grad_norm", 26),
        ("loss/behaviour_kl", 28),
    ]
    assert departure_line(found).startswith("step 26 loss/grad_norm 3 (band 0.05")
    assert found[0].holds(0.3)
    assert not found[0].holds(1.0)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("reward/mean", wave(40, 0.4, 0.6)),
        ("reward/mean", [0.1 + 0.02 * n for n in range(40)]),  # it learns
        ("loss/grad_norm", [*wave(30, 0.1, 0.2), 0.5, *wave(9, 0.1, 0.2)]),  # once, and not far
        ("loss/behaviour_kl", [*wave(30, 1e-6, 2e-6), *wave(10, 1e-5, 9e-5)]),  # below the floor
        ("loss/lr", [1e-5 * (1 - n / 40) for n in range(40)]),  # a schedule
        ("reward/mean", [0.0] * 9 + [1.0] * 9),  # too short a past
    ],
)
def test_what_runs_do_is_no_departure(key: str, values: list[float]) -> None:
    assert departures(rows_of({key: values})) == []


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of planted runs, with the run that most of them continue."""
    folder = tmp_path_factory.mktemp("planted")
    write_data(folder)
    train(folder, folder / "healthy", f"trainer.num_steps={HEALTHY}")
    return folder


def asked(run_dir: Path, folder: Path) -> dict[str, object]:
    file = folder / f"{run_dir.name}.json"
    assert main(["why", str(run_dir), "--json", str(file), "--html", f"{file}.html"]) == 0
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.cpu_engine
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault, marks=() if fault.name == "wrong mask" else pytest.mark.soak, id=fault.name
        )
        for fault in FAULTS
    ],
)
def test_a_planted_fault_is_named(healthy: Path, fault: Fault, capsys) -> None:
    run_dir = planted_run(healthy, healthy / "healthy", fault)
    capsys.readouterr()
    found = asked(run_dir, healthy)
    shown = capsys.readouterr().out
    assert found["symptoms"], shown
    assert abs(found["symptoms"][0]["step"] - fault.step) <= 2, shown
    assert found["reason"]["kind"] in fault.kinds, shown
    if fault.name == "wrong mask":  # a replay refutes what changes nothing
        refuted = {each["kind"] for each in found["tests"] if each["explains"] is False}
        assert {"learning rate", "staleness", "kl", "samples"} <= refuted


HEALTHY_RUNS: dict[str, tuple[str, ...]] = {
    "another seed": ("seed=1",),
    "a third seed": ("seed=2",),
    "synchronous": ("rollout.over_sampling_factor=1", "rollout.refill=false"),
    "many old tokens": ("rollout.over_sampling_factor=2.5",),
    "a schedule": ("optimizer.schedule=cosine", "optimizer.warmup_steps=8", "optimizer.lr=3e-4"),
    "gspo": ("algorithm=gspo",),
    "cispo": ("algorithm=cispo", "trainer.num_minibatches=2"),
    "ppo": ("algorithm=ppo", "critic.lr=1e-3"),
    "lora": ("lora.rank=8", "optimizer.lr=1e-3"),
    "small batches": ("trainer.num_groups=6", "algorithm.dynamic_sampling=true"),
}


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
@pytest.mark.parametrize("kind", HEALTHY_RUNS)
def test_a_healthy_run_has_no_alarm(healthy: Path, kind: str, capsys) -> None:
    run_dir = healthy / kind.replace(" ", "_")
    train(healthy, run_dir, "trainer.num_steps=60", *HEALTHY_RUNS[kind])
    assert main(["why", str(run_dir)]) == 0
    assert "no metric left its band" in capsys.readouterr().out
