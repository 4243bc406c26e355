"""What the watchdog concludes from what it sees, without processes that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest
from scenes import member, vitals

from april_rl.rollout.requests import Requests
from april_rl.runtime.in_flight import Flight
from april_rl.runtime.supervision.failures import WorkerStalledError
from april_rl.runtime.supervision.heartbeat import Activity, Pulse, PulseReader, stat_of, told
from april_rl.runtime.supervision.node_monitor import Sentry, Vitals
from april_rl.runtime.supervision.progress import Silence
from april_rl.runtime.supervision.watchdog import Watchdog
from april_rl.ticks import Tick
from april_rl.types import Completion, SampleId


def watched(silence: Silence, *of_ranks: Vitals, passed_s=1.0, waited_for=(0, 1)) -> None:
    silence.observe(of_ranks, passed_s=passed_s, waited_for=waited_for)


def test_silence_is_the_time_without_a_beat_of_a_worker_that_is_waited_for():
    """Fails when a worker without a call grows silent, or a beat does not end the silence."""
    silence = Silence(2)
    for beats in (1, 1, 1, 1):
        watched(silence, vitals(beats=beats), vitals(beats=1), waited_for=(0,))
    assert [silence.silent_s(rank) for rank in (0, 1)] == [3.0, 0.0]
    watched(silence, vitals(beats=2), vitals(beats=1))
    assert [silence.silent_s(rank) for rank in (0, 1)] == [0.0, 1.0]


def test_a_controller_that_was_itself_suspended_does_not_blame_its_workers():
    """An hour between two looks is Ctrl-Z and fg. Fails when it counts as an hour of silence."""
    silence = Silence(2)
    watched(silence, vitals(), vitals("T"))
    watched(silence, vitals(), vitals("T"), passed_s=3600.0)
    assert silence.silent_s(0) < 10
    assert silence.stopped_s(1) < 10
    watched(silence, vitals(), vitals("S"))
    assert silence.stopped_s(1) == 0.0


def test_only_kills_since_a_worker_was_met_are_counted(tmp_path):
    """Three before. Fails when the counter itself is told, or counted from where a sentry begins:
    Ray may start it anew, after the kill. A counter that is gone tells of none.
    """
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 9\noom_kill 3\n")
    met = member(counter=str(counter), kills=3)
    assert Sentry([met]).machine().oom_kills == 0
    counter.write_text("low 0\noom 9\noom_kill 5\n")
    assert Sentry([met, member(counter=str(counter), kills=4)]).machine().oom_kills == 2
    counter.unlink()
    assert Sentry([met]).machine().oom_kills == 0
    assert Sentry([]).machine().oom_kills == 0


def test_a_report_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    """A full disk, say. Fails when what the disk says is raised instead, or the report is lost."""
    (tmp_path / "file").touch()
    report = tmp_path / "file" / "stall_report.txt"
    watchdog = Watchdog(report=report, stall_timeout_s=1, call_timeout_s=1)
    with pytest.raises(WorkerStalledError, match="what was seen") as caught:
        watchdog.stalled("what was seen")
    assert "could not be written" in str(caught.value)
    assert "oldest request in flight: none" in str(caught.value)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def of_prompt_7(*indices: int) -> Requests:
    count = len(indices)
    return Requests(24, 0, [7] * count, indices, [(1,) * 8] * count, [((1,) * 4,)] * count)


def tick(*indices: int, engine_steps: int) -> Tick:
    finished = tuple(
        Completion(
            sample_id=SampleId(7, index),
            start=4,
            policy_version=0,
            context_version=0,
            token_ids=(5,),
            logprobs=(-0.5,),
            finish_reason="stop",
        )
        for index in indices
    )
    return Tick(
        finished=finished,
        num_running=0,
        num_queued=0,
        engine_steps=engine_steps,
        slot_steps=0,
        context_token_steps=0,
        generated_tokens=0,
        prefilled_tokens=0,
        elapsed_s=0.0,
    )


def test_the_oldest_request_is_the_one_launched_first_of_those_not_finished():
    """Fails when a finished one, or one resumed later, is shown."""
    clock = Clock()
    flight = Flight(clock=clock)
    assert flight.oldest() == ""
    flight.launch(2, of_prompt_7(0, 1))
    clock.now_s += 30
    flight.launch(1, of_prompt_7(2))
    flight.absorb(tick(0, engine_steps=4))
    clock.now_s += 5
    assert flight.oldest() == (
        "sample 1 of prompt 7, on engine 2 for 35.0 s, sent with 12 tokens (4 of them of its "
        "response) and 20 to go; 2 requests are in flight"
    )
    flight.abort()
    assert flight.oldest() == ""


def test_engines_are_stuck_from_the_last_engine_step_while_something_is_in_flight():
    """Fails when a tick without a step counts, or the time in which nothing was in flight."""
    clock = Clock()
    flight = Flight(clock=clock)
    clock.now_s += 1000
    flight.launch(0, of_prompt_7(0))
    assert flight.stuck_s == 0.0
    clock.now_s += 10
    flight.absorb(tick(engine_steps=8))
    clock.now_s += 10
    flight.absorb(tick(engine_steps=0))
    flight.launch(0, of_prompt_7(1))
    assert flight.stuck_s == 10.0
    flight.absorb(tick(0, 1, engine_steps=1))
    clock.now_s += 1000
    assert flight.stuck_s == 0.0


class Busy:
    """Something with a pulse."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        self.reader = PulseReader(self.pulse.member("here"))

    @told
    def update(self, fails: bool) -> Activity:
        self.pulse.beat(engine_steps=3, generated_tokens=50)
        if fails:
            raise ValueError("as told")
        return self.reader.activity()


def test_a_pulse_says_what_runs_and_what_ran_last_also_after_a_failure():
    busy = Busy()
    during = busy.update(False)
    assert (during.call, during.is_running, during.call_beats) == ("update", True, 1)
    assert (during.engine_steps, during.generated_tokens) == (3, 50)
    try:
        busy.update(True)
    except ValueError:
        after = busy.reader.activity()
    assert (after.call, after.is_running, after.engine_steps) == ("update", False, 6)
    assert after.beats > during.beats


def test_a_sentry_sees_a_process_stop_and_end_and_never_kills_the_next_of_its_number():
    """Fails when a zombie counts as alive, or when death is told by the number alone."""
    code = "import time; print(flush=True); time.sleep(600)"
    with ExitStack() as exits:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        exits.enter_context(process)
        exits.callback(process.kill)
        process.stdout.readline()  # a process that is just starting may have no memory yet
        sentry = Sentry([member(process.pid, born=stat_of(process.pid).born)])
        [alive] = sentry.look()
        assert not alive.is_dead
        assert alive.rss_bytes > 0
        os.kill(process.pid, signal.SIGSTOP)
        while not sentry.look()[0].is_stopped:
            pass
        before = Sentry([member(process.pid, born="1")])
        assert before.look()[0].is_dead
        before.mark()
        before.end()
        assert sentry.look()[0].is_stopped, "another process had the number before"
        sentry.mark()
        sentry.end()
        while not sentry.look()[0].is_dead:
            pass
        assert sentry.look()[0].rss_bytes == 0
        [found] = sentry.findings(0.1)
        assert "no stacks: the process is dead" in found.stacks


@pytest.mark.parametrize(("stderr", "expected"), [("log", "last words"), ("/proc/self/mem", "")])
def test_the_end_of_a_log_is_found_and_one_that_cannot_be_read_is_no_error(
    tmp_path, stderr, expected
):
    """Reading memory where there is none is an OSError, as of a disk that has gone. Fails when
    that ends the report.
    """
    code = (
        "import sys, time\n"
        "from april_rl.runtime.supervision.heartbeat import Pulse\n"
        "found = Pulse().member('here')\n"
        "print(found.born, found.pulse_fd, found.stacks_fd, flush=True)\n"
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
        born, *fds = process.stdout.readline().split()
        pulse_fd, stacks_fd = map(int, fds)
        found = replace(
            member(process.pid, born=born.decode()), pulse_fd=pulse_fd, stacks_fd=stacks_fd
        )
        [findings] = Sentry([found]).findings(5.0)
    assert "<module>" in findings.stacks
    assert findings.log_tail == expected
