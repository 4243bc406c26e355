"""tools/bench.py starts, and its rollout benchmark measures the modes that the README shows."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
from source_tree import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from bench import rollout


class Engine:
    kv_cache_tokens = 10_000


@pytest.mark.parametrize("name", ["rollout", "step"])
def test_each_benchmark_explains_its_options(name):
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "--rounds" in done.stdout


def test_each_factor_is_measured_beside_the_synchronous_loop_and_the_limit():
    parser = argparse.ArgumentParser()
    rollout.add_arguments(parser)
    modes = rollout.modes_of(parser.parse_args(["--factors", "2"]), Engine())
    assert [(mode.name, mode.factor) for mode in modes] == [
        ("synchronous", 1),
        ("limit", 1),
        ("one-shot", 2),
        ("refill", 2),
        ("refill, keep", 2),
        ("limit", 2),
        ("refill, keep, auto", 1),
    ]
