"""tools/bench.py starts, and its rollout benchmark measures the modes that the README shows."""

import argparse
import subprocess
import sys

import pytest
from bench import rollout
from source_tree import ROOT

from april_rl.lab.simulator.length_distributions import Lognormal
from april_rl.lab.simulator.simulated_engine import SimulatedEngine


class Engine(SimulatedEngine):
    """An engine that counts its work in place of the real one, and records where samples began."""

    kv_cache_tokens = 10_000

    def __init__(self):
        super().__init__(
            length_of=Lognormal(median_tokens=64, sigma=1.0),
            cost=rollout.ANY_COST,
            keeps_parked=False,
            max_batched_tokens=1024,
        )
        self.policy_version, self.starts = 0, []

    def advance(self, submit, **limits):
        self.starts += [request.start for request in submit]
        return super().advance(submit, **limits)

    def release_parked(self):
        """Do nothing, because nothing is kept."""


@pytest.mark.parametrize("name", ["rollout", "step"])
def test_each_benchmark_explains_its_options(name):
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "--rounds" in done.stdout


def test_each_factor_is_measured_with_the_synchronous_loop_and_the_limit():
    parser = argparse.ArgumentParser()
    rollout.add_arguments(parser)
    args = parser.parse_args(["--factors", "2"])
    modes = rollout.modes_of(args, Engine())
    assert [(mode.name, mode.factor) for mode in modes] == [
        ("synchronous", 1),
        ("limit", 1),
        ("one-shot", 2),
        ("refill", 2),
        ("refill, keep", 2),
        ("limit", 2),
    ]


def test_the_engine_continues_the_samples_that_the_simulated_steps_parked():
    """Fails when slots are empty at the beginning: a mode that finishes short responses would look
    fast.
    """
    parser = argparse.ArgumentParser()
    rollout.add_arguments(parser)
    engine = Engine()
    modes = rollout.modes_of(parser.parse_args(["--factors", "2"]), engine)
    [mode] = [mode for mode in modes if mode.name == "refill"]
    mode.simulate(20, rollout.measured_cost(modes))
    assert engine.starts == []
    mode.run(1, lambda: None)
    assert sum(start > 0 for start in engine.starts) > 128
