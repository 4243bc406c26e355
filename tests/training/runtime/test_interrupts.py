"""Signals: raised once, recorded, and delayed where an interruption would do damage."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from april_rl.run.supervision.interrupts import SIGNALS, Interrupts, block_signals


@pytest.fixture(autouse=True)
def _without_nohup() -> None:
    """Take SIGHUP again where `nohup` started the tests, which ignores it in all of them."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    owner = Interrupts()
    yield owner
    owner.disarm()


@pytest.mark.parametrize("which", SIGNALS)
def test_a_signal_raises_once_and_is_remembered(interrupts, which):
    """Fails when a swallowed interrupt is forgotten, or a signal that `timeout` sends twice ends
    the program at once.
    """
    interrupts.check()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), which)
    os.kill(os.getpid(), which)  # the signal no longer raises
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()


class SignalledInDel:
    """An object that is destroyed while a signal arrives."""

    def __init__(self, which: signal.Signals) -> None:
        self._which = which

    def __del__(self) -> None:
        os.kill(os.getpid(), self._which)
        time.sleep(0)  # the handler runs here


def start(which: signal.Signals) -> None:
    SignalledInDel(which)  # it is destroyed at once, because no name refers to it
    time.sleep(30)  # Ray and vLLM would be started here


@pytest.mark.parametrize("which", SIGNALS)
def test_a_signal_whose_exception_a_del_swallows_raises_soon(interrupts, which, capsys):
    """Fails when a stop early in the start is lost, and stacks are only printed at the deadline."""
    with pytest.raises(KeyboardInterrupt):
        start(which)
    assert interrupts.is_requested
    assert "ignored" not in capsys.readouterr().err


def test_a_held_signal_raises_only_where_the_run_checks(interrupts):
    """Fails when a step is interrupted between two updates of its records."""
    with interrupts.hold(deadline_s=60):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()


def test_max_hours_stops_the_run(interrupts):
    """Fails when the check for signals ignores trainer.max_hours."""
    interrupts.end_after(hours=1e-9)
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
    assert interrupts.reason == "trainer.max_hours=1e-09"
    assert not interrupts.is_person


def test_a_second_signal_ends_the_program_and_its_children_at_once():
    """Fails when a person who presses Ctrl-C again has to wait for a checkpoint."""
    code = (
        "import subprocess, sys, time\n"
        "from april_rl.run.supervision.interrupts import Interrupts\n"
        "interrupts = Interrupts()\n"
        "with interrupts.hold(deadline_s=600):\n"
        "    subprocess.Popen(['sleep', '600'])\n"
        "    print(flush=True)\n"
        "    while True:\n"
        "        time.sleep(0.1)\n"
        "        if interrupts.is_requested: print(flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        run.stdout.readline()
        run.send_signal(signal.SIGTERM)
        run.stdout.readline()
        time.sleep(1.2)
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=600)  # returns after the child, which shares the output, has ended
        assert run.returncode == 130


@pytest.mark.parametrize("deadline_s", [0.2, 60.0])
def test_a_process_that_lives_on_is_not_ended(deadline_s, capfd):
    """A notebook, whose stop button is pressed twice, or once where the run hangs. Fails when its
    process or its own children are killed, or the run continues.
    """
    mine = subprocess.Popen(["sleep", "600"])
    interrupts = Interrupts(owns_process=False)
    of_run = subprocess.Popen(["sleep", "600"])
    with interrupts.hold(deadline_s=deadline_s):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            press_again()
    interrupts.disarm()
    assert of_run.wait(10) == -signal.SIGKILL
    assert mine.poll() is None
    assert ("did not end within 0.2 s" in capfd.readouterr().err) == (deadline_s < 1)
    mine.kill()
    mine.wait(10)


def press_again() -> None:
    time.sleep(1.2)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_closed_terminal_stops_the_run_unless_nohup_started_it(is_ignored):
    """Fails when the run writes to a terminal that is gone, or `nohup` has no effect."""
    code = (
        "import sys, time\n"
        "from april_rl.run.supervision.interrupts import Interrupts\n"
        "interrupts = Interrupts()\n"
        "with interrupts.hold(deadline_s=60):\n"
        "    print('ready', flush=True)\n"
        "    end = time.monotonic() + 2\n"
        "    while time.monotonic() < end and not interrupts.is_requested:\n"
        "        time.sleep(0.01)\n"
        "print('saving', flush=True)\n"
        "sys.exit(7 if interrupts.is_requested else 8)\n"
    )
    ours, theirs = os.openpty()
    out, into = os.pipe() if is_ignored else (ours, theirs)  # `nohup` redirects the output
    command = [*(["nohup"] if is_ignored else []), sys.executable, "-c", code]
    run = subprocess.Popen(command, stdin=theirs, stdout=into, stderr=into, preexec_fn=lead)
    os.close(theirs)
    said = b""
    while b"ready" not in said:
        said += os.read(out, 1000)
    os.close(ours)  # the kernel sends SIGHUP
    assert run.wait(60) == (8 if is_ignored else 7)


def lead() -> None:
    """Make the terminal at stdin the one of a new session."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_processes_started_in_the_meantime_do_not_get_the_signals():
    """Fails when a scheduler's signal to every process of a job reaches Ray's processes."""
    with block_signals():
        child = subprocess.Popen(["sleep", "600"])
    for which in SIGNALS:
        child.send_signal(which)
    time.sleep(0.3)
    assert child.poll() is None
    child.kill()
    assert child.wait(10) == -signal.SIGKILL


def test_a_signal_that_reaches_rays_handler_is_a_normal_stop():
    """Ray's handler exits with the signal's number. Fails when a run ends without a message."""
    with pytest.raises(KeyboardInterrupt), block_signals():
        sys.exit(signal.SIGTERM)
