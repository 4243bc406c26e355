"""A stand-in for Slurm's srun: one process on this machine for each node of the step.

Each task knows the name of its node, which has one CPU, and writes a line to $STEPS_LOG. SIGTERM
ends the step with everything it started, as in Slurm. The exit status is the highest of the tasks.
"""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # processes that a task leaves behind become children of this process
_WITH_A_VALUE = ("-w", "-x")


def _named(option: str, arguments: list[str]) -> list[str]:
    return [arguments[arguments.index(option) + 1]] if option in arguments else []


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    index = 0
    while arguments[index].startswith("-"):
        index += 2 if arguments[index] in _WITH_A_VALUE else 1
    return arguments[:index], arguments[index:]


def _nodes(options: list[str]) -> list[str]:
    every = os.environ.get("SLURM_JOB_NODELIST", "only").split(",")
    return _named("-w", options) or [node for node in every if node not in _named("-x", options)]


def _start(node: str, command: list[str]) -> subprocess.Popen[bytes]:
    with Path(os.environ["STEPS_LOG"]).open("a") as log:
        log.write(f"{node}: {' '.join(command)}\n")
    own = {"SLURMD_NODENAME": node, "SLURM_CPUS_ON_NODE": "1"}
    return subprocess.Popen(command, env={**os.environ, **own})


def _end_all(*_: object) -> None:
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(143)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _end_all)
    options, command = _split(sys.argv[1:])
    tasks = [_start(node, command) for node in _nodes(options)]
    sys.exit(max(task.wait() for task in tasks))
