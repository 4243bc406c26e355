"""The row that a race ends with."""

from pathlib import Path

import pytest
import speedrun

from april_rl.config.store import compose_overrides, recipes
from april_rl.lab.report.run_files import RunFiles

KEY = f"eval/{speedrun.TARGET.evaluation_set}/avg_at_k"
SETTINGS = {"trainer": {"num_groups": 4}, "rollout": {"group_size": 8}}


def run(*accuracies: float, step_s: float = 60.0) -> RunFiles:
    """Return a run that was evaluated before its first step and after each."""
    step = {"time/step_s": step_s, "throughput/trained_tokens": 500.0}
    first, *others = [{KEY: accuracy} for accuracy in accuracies]
    rows = [{"step": 0.0, **first}]
    rows += [{"step": float(n), **step, **other} for n, other in enumerate(others, start=1)]
    return RunFiles(Path("run"), rows, SETTINGS)


def test_the_row_has_the_costs_until_the_target_over_the_seeds(monkeypatch: pytest.MonkeyPatch):
    """The target is reached half-way between two evaluations: after 1.5 steps of each run."""
    monkeypatch.setattr(speedrun, "versions", lambda: {"commit": "0123456789"})
    target = speedrun.TARGET.accuracy
    runs = [run(0.1, target - 0.1, target + 0.1, step_s=60.0 * each) for each in (1, 2, 3)]
    cells = speedrun.row(runs, "lr=1").split(" | ")
    # Half an interval of 1.5, 3 and 4.5 minutes is 4.303 · 1.5 / √3.
    assert cells[0] == "| 3.0 ± 3.7"
    assert cells[1:3] == ["48 ± 0", "1 ± 0"]
    assert cells[3:6] == [f"{target + 0.1:.3f} ± 0.000", "4.0 ± 5.0", "`lr=1`"]
    assert cells[6].startswith("01234567, ")


def test_a_seed_that_never_reached_the_target_is_counted():
    target = speedrun.TARGET.accuracy
    runs = [run(0.1, target), run(0.1, target), run(0.1, target - 0.01)]
    assert speedrun.row(runs, "").startswith("| 1 never | 1 never | 1 never |")


def test_the_recipe_is_evaluated_on_the_set_of_the_target():
    assert "speedrun" in recipes()
    found = compose_overrides(["+recipe=speedrun"])
    assert speedrun.TARGET.evaluation_set in found.evaluation.sets
