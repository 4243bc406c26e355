"""The process that simulates for `rollout.over_sampling_factor=auto` is light and never left
behind.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from own_process import is_running, wait_until
from pebble import ProcessExpired
from source_tree import TESTS
from tuned_runs import scenario

from april_rl.lab.simulator.length_distributions import Recorded
from april_rl.lab.simulator.prediction import Mode
from april_rl.lab.tuning.comparison import Comparison
from april_rl.lab.tuning.process import SimulationProcess

LENGTHS = Recorded(groups=((5, 9), (7, 30)))
TWICE = Mode(2.0, refill=True)
QUICK = Comparison(
    scenario(num_groups=2, group_size=2, length_of=LENGTHS), (Mode(1.0, refill=True), TWICE)
)
# The comparison takes half a minute.
LONG = Comparison(scenario(num_groups=64, group_size=16, length_of=LENGTHS), (TWICE,) * 20)
CONTROLLER = """
import sys
from test_tuning_process import LONG, working_child
from april_rl.lab.tuning.process import SimulationProcess

if __name__ == "__main__":
    process = SimulationProcess()
    process.submit(LONG)
    print(working_child().pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def process() -> Iterator[SimulationProcess]:
    process = SimulationProcess()
    yield process
    process.close()


def working_child() -> psutil.Process:
    """Return the simulation process, which is the newest child, once it computes."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for child in reversed(psutil.Process().children()):
            with suppress(psutil.NoSuchProcess):  # the process has ended in the meantime
                if "spawn_main" in " ".join(child.cmdline()):
                    if sum(child.cpu_times()[:2]) > 0.8:
                        return child
                    break
        time.sleep(0.05)
    raise TimeoutError("no child computes")


def test_the_simulation_process_returns_results_and_errors(process: SimulationProcess) -> None:
    """It continues after an error. Fails when an error ends it or makes it hang."""
    nothing = replace(QUICK.scenario, length_of=Recorded(groups=()))
    without_lengths = process.submit(replace(QUICK, scenario=nothing))
    answer = process.submit(QUICK)
    assert "mean requires" in str(without_lengths.exception(timeout=60))
    assert answer.result(timeout=60) == QUICK.predictions()


def test_a_process_that_dies_before_its_result_gives_an_error(process: SimulationProcess) -> None:
    """The kernel kills it when memory is short, for example. Fails when the call never returns."""
    answer = process.submit(LONG)
    os.kill(working_child().pid, signal.SIGKILL)
    assert isinstance(answer.exception(timeout=60), ProcessExpired)


def test_close_ends_the_simulation_process_at_any_time() -> None:
    """Fails when it first computes to the end, for half a minute."""
    process = SimulationProcess()
    process.submit(LONG)
    child = working_child()
    started = time.monotonic()
    process.close()
    wait_until(lambda: not is_running(child.pid))
    assert time.monotonic() - started < 20


def test_the_simulation_process_ends_when_the_controller_is_killed(tmp_path: Path) -> None:
    """Fails when it computes to the end, or forever."""
    (tmp_path / "controller.py").write_text(CONTROLLER)
    controller = subprocess.Popen(
        [sys.executable, "controller.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{TESTS}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with controller:
        assert controller.stdout
        pid = int(controller.stdout.readline())
        assert psutil.pid_exists(pid)
        controller.kill()
    wait_until(lambda: not is_running(pid), within_s=20)


def test_the_simulation_process_loads_nothing_heavy() -> None:
    """Fails when the simulator, or what it imports, needs torch, vllm or ray."""
    script = "import sys, april_rl.lab.tuning.process; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy = {"torch", "vllm", "ray", "transformers", "datasets", "hydra", "omegaconf"}
    assert not heavy & set(ran.stdout.split())
