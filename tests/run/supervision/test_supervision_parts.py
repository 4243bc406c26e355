"""Single parts of supervision: heartbeat, node monitor, progress timer, step timer."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest
from clock import Clock
from cluster_snapshots import process_of, status
from light_samples import completion, make_tick

from april_rl.run.supervision.failures import WorkerStalledError
from april_rl.run.supervision.heartbeat import (
    Activity,
    Heartbeat,
    HeartbeatReader,
    WorkerProcess,
    read_stat,
    records_activity,
)
from april_rl.run.supervision.node_monitor import NodeMonitor, ProcessStatus
from april_rl.run.supervision.watchdog import ProgressTimer, Watchdog
from april_rl.training.rollout.ticks import Tick
from april_rl.training.runtime.engines import StepTimer


def update(
    timer: ProgressTimer, *statuses: ProcessStatus, elapsed_s=1.0, waited_for=(0, 1)
) -> None:
    timer.update(statuses, elapsed_s=elapsed_s, waited_for=waited_for)


def test_time_without_progress_counts_from_the_last_beat_while_a_call_is_open():
    """Fails when it counts for a worker without a call, or when a beat does not reset it."""
    timer = ProgressTimer(2)
    for beats in (1, 1, 1, 1):
        update(timer, status(beats=beats), status(beats=1), waited_for=(0,))
    assert [timer.workers[rank].no_progress_s for rank in (0, 1)] == [3.0, 0.0]
    update(timer, status(beats=2), status(beats=1))
    assert [timer.workers[rank].no_progress_s for rank in (0, 1)] == [0.0, 1.0]


def test_a_controller_that_was_itself_suspended_does_not_blame_its_workers():
    """As with Ctrl-Z, and fg an hour later. Fails when that counts as an hour without progress."""
    timer = ProgressTimer(2)
    update(timer, status(), status("T"))
    update(timer, status(), status("T"), elapsed_s=3600.0)
    assert timer.workers[0].no_progress_s < 10
    assert 0 < timer.workers[1].stopped_s < 10
    update(timer, status(), status("S"))
    assert timer.workers[1].stopped_s == 0.0


def test_time_stopped_counts_from_when_a_process_is_first_found_stopped():
    """Fails when earlier time counts: a controller may not have checked for seconds."""
    timer = ProgressTimer(1)
    update(timer, status("S"))
    update(timer, status("T"), elapsed_s=3.0)
    assert timer.workers[0].stopped_s == 0.0
    update(timer, status("T"))
    assert timer.workers[0].stopped_s == 1.0


def counted_kills(*processes: WorkerProcess) -> list[int]:
    return [status.oom_kills for status in NodeMonitor(processes).statuses()]


def test_only_memory_kills_since_a_worker_is_watched_are_counted(tmp_path):
    """There were three before. Fails when the total is shown, or kills count only from the start of
    the monitor, which Ray may restart after the kill. A missing counter counts as zero.
    """
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 9\noom_kill 3\n")
    watched = process_of(counter=str(counter), kills=3)
    assert counted_kills(watched) == [0]
    counter.write_text("low 0\noom 9\noom_kill 5\n")
    later = process_of(counter=str(counter), kills=4)
    assert counted_kills(watched, later) == [2, 1]
    counter.unlink()
    assert counted_kills(watched) == [0]


def test_a_report_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    """On a full disk. Fails when the disk's error is raised instead, or the report is lost."""
    (tmp_path / "file").touch()
    report = tmp_path / "file" / "stall_report.txt"
    watchdog = Watchdog(report=report, stall_timeout_s=1, call_timeout_s=1)
    with pytest.raises(WorkerStalledError, match="what was seen") as caught:
        watchdog.raise_stalled("what was seen")
    assert "could not be written" in str(caught.value)
    assert "the state of the workers is unknown" in str(caught.value)


def tick(*, num_finished: int, engine_steps: int) -> Tick:
    ended = (completion(index, start=4, num_tokens=1, version=0) for index in range(num_finished))
    finished = [replace(each, finish_reason="stop") for each in ended]
    return make_tick(finished, engine_steps=engine_steps)


def test_time_without_an_engine_step_counts_while_requests_are_in_flight():
    clock = Clock(now_s=100.0)
    timer = StepTimer(clock=clock)
    clock.now_s += 1000
    timer.launch(1)
    assert timer.no_step_s == 0.0
    clock.now_s += 10
    timer.record(tick(num_finished=0, engine_steps=8))
    clock.now_s += 10
    timer.record(tick(num_finished=0, engine_steps=0))
    timer.launch(2)
    assert timer.no_step_s == 10.0
    timer.record(tick(num_finished=2, engine_steps=1))
    clock.now_s += 1000
    assert timer.no_step_s == 1000.0
    timer.clear()
    assert timer.no_step_s == 0.0
    timer.launch(1)
    assert timer.no_step_s == 0.0


class HeartbeatWorker:
    """A worker that reads its own heartbeat."""

    def __init__(self) -> None:
        self.heartbeat = Heartbeat()
        self.reader = HeartbeatReader(self.heartbeat.process("node"))

    @records_activity
    def update(self, fails: bool) -> Activity:
        self.heartbeat.beat()
        if fails:
            raise ValueError("as the test asked")
        return self.reader.activity()


def test_a_heartbeat_shows_the_running_call_and_the_last_one_even_after_a_failure():
    worker = HeartbeatWorker()
    during = worker.update(False)
    assert (during.call, during.is_running, during.call_beats) == ("update", True, 1)
    try:
        worker.update(True)
    except ValueError:
        after = worker.reader.activity()
    assert (after.call, after.is_running) == ("update", False)
    assert after.beats > during.beats


def test_a_monitor_sees_a_process_stop_and_end_and_never_kills_one_that_reuses_its_pid():
    """Fails when a zombie counts as alive, or when a process is identified only by its pid."""
    code = "import time; print(flush=True); time.sleep(600)"
    with ExitStack() as exits:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        exits.enter_context(process)
        exits.callback(process.kill)
        process.stdout.readline()  # a process that is just starting may have no memory yet
        start_ticks = read_stat(process.pid).start_ticks
        monitor = NodeMonitor([process_of(process.pid, start_ticks=start_ticks)])
        [alive] = monitor.statuses()
        assert not alive.is_dead
        assert alive.rss_bytes > 0
        os.kill(process.pid, signal.SIGSTOP)
        while not monitor.statuses()[0].is_stopped:
            pass
        earlier = NodeMonitor([process_of(process.pid, start_ticks="1")])
        assert earlier.statuses()[0].is_dead
        earlier.find_processes()
        earlier.kill_processes()
        assert monitor.statuses()[0].is_stopped, "another process had this pid before"
        monitor.find_processes()
        monitor.kill_processes()
        while not monitor.statuses()[0].is_dead:
            pass
        assert monitor.statuses()[0].rss_bytes == 0
        [trace] = monitor.collect_traces(0.1)
        assert "no stacks: the process is dead" in trace.stacks


@pytest.mark.parametrize(("stderr", "expected"), [("log", "last words"), ("/proc/self/mem", "")])
def test_the_report_has_the_end_of_a_log_and_skips_an_unreadable_one(tmp_path, stderr, expected):
    """Reading /proc/self/mem at 0 raises an OSError, like a disk that has disappeared. Fails when
    that ends the report.
    """
    code = (
        "import sys, time\n"
        "from april_rl.run.supervision.heartbeat import Heartbeat\n"
        "found = Heartbeat().process('node')\n"
        "print(found.start_ticks, found.heartbeat_fd, found.stacks_fd, flush=True)\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / stderr
    if expected:
        log.write_text(expected)
    with log.open() as file, ExitStack() as exits:
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file)
        exits.enter_context(process)
        exits.callback(process.kill)
        start_ticks, *fds = process.stdout.readline().split()
        heartbeat_fd, stacks_fd = map(int, fds)
        found = replace(
            process_of(process.pid, start_ticks=start_ticks.decode()),
            heartbeat_fd=heartbeat_fd,
            stacks_fd=stacks_fd,
        )
        [trace] = NodeMonitor([found]).collect_traces(5.0)
    assert "<module>" in trace.stacks
    assert trace.log_tail == expected
