"""What the watchdog concludes from what it sees, without processes that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from april_rl.runtime.calls import WorkerMemoryError, WorkerStalledError, failure_of
from april_rl.runtime.flight import Flight
from april_rl.runtime.pulse import Activity, Member, Pulse, PulseReader, stat_of, told
from april_rl.runtime.scene import GIB, Scene, died, failed, out_of_memory, silent
from april_rl.runtime.sentry import UNSEEN, Findings, Machine, Sentry, Vitals
from april_rl.runtime.silence import Silence
from april_rl.runtime.stall_report import report_text
from april_rl.runtime.watchdog import Watchdog
from april_rl.types import Completion, Request, SampleId, Tick


def member(pid: int = 100, *, born: str = "1") -> Member:
    return Member(node_id="a" * 56, host="node-a", pid=pid, born=born, pulse_fd=-1, stacks_fd=-1)


def vitals(state="S", *, call="update", call_beats=3, is_running=True, beats=10) -> Vitals:
    activity = Activity(
        beats=beats, call=call, is_running=is_running, call_beats=call_beats, call_s=12.5
    )
    return Vitals(state=state, rss_bytes=3 * GIB, activity=activity)


def scene(*of_ranks: Vitals, oom_kills: int = 0) -> Scene:
    ranks = range(len(of_ranks))
    machine = Machine(total_bytes=64 * GIB, free_bytes=GIB, oom_kills=oom_kills)
    return Scene(
        members=[member(100 + rank) for rank in ranks],
        vitals=of_ranks,
        machines=[machine for _ in ranks],
        oom_kills=[oom_kills for _ in ranks],
        most_rss_bytes=[5 * GIB for _ in ranks],
    )


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


def test_those_who_wait_wait_for_the_dead_then_the_stopped_then_the_one_behind():
    """Fails when the order is another, or one that runs no call waits for anybody."""
    even, behind, idle = vitals(), vitals(call_beats=2), vitals(is_running=False)
    assert scene(even, behind, vitals(UNSEEN), vitals("T")).waiting().endswith("for worker 3")
    assert scene(even, behind, vitals(UNSEEN)).waiting() == "workers 0, 1 for worker 2"
    assert scene(even, behind, vitals("T"), vitals("")).waiting() == "workers 0, 1, 2 for worker 3"
    assert scene(even, behind, vitals("T")).waiting() == "workers 0, 1 for worker 2"
    assert scene(even, behind, even).waiting() == "workers 0, 2 for worker 1"
    assert scene(even, even, idle).waiting() == "workers 0, 1 for worker 2"
    assert scene(even, even).waiting() == ""
    assert scene(idle, idle).waiting() == ""


def test_a_death_for_want_of_memory_says_so_and_what_to_lower():
    """The kernel says it by its counter only, Ray in its own words, which are these."""
    assert not isinstance(died(scene(vitals("")), 0), WorkerMemoryError)
    by_kernel = died(scene(vitals("", call="advance"), oom_kills=1), 0)
    assert isinstance(by_kernel, WorkerMemoryError)
    assert "worker 0 (pid 100 on node-a) ran out of memory in advance" in str(by_kernel)
    assert "It held 5.00 GiB; 1.0 of the 64.0 GiB of its machine" in str(by_kernel)
    assert "engine.kv_cache_gib" in str(by_kernel)
    said = "1 worker(s) were killed due to the node running low on memory.\nMore\nof it"
    for error in (OutOfMemoryError("killed"), RayActorError(error_msg=said)):
        by_ray = failed(scene(vitals("")), 0, failure_of(error))
        assert isinstance(by_ray, WorkerMemoryError), error
    assert "(1 worker(s) were killed due to the node running low on memory.)" in str(by_ray)


def test_what_allocators_say_is_understood_as_want_of_memory():
    """Of torch on CUDA and CPU, and of Python. Fails when only one exception class is known."""
    for cause in (
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ):
        error = RayTaskError("update", "its traceback", cause)
        assert failure_of(error).is_memory, cause
    assert not failure_of(RayTaskError("update", "its traceback", IndexError("row"))).is_memory


def test_each_call_has_its_own_advice_and_a_worker_nobody_has_met_has_some():
    assert "learner.max_tokens" in str(out_of_memory(scene(vitals()), 0, "said"))
    unmet = Scene(members=(), vitals=(), machines=(), oom_kills=(), most_rss_bytes=())
    assert "in its start" in str(out_of_memory(unmet, None, "said"))
    assert str(silent(unmet, None, key="runtime.call_timeout_s", limit_s=9)).startswith(
        "a worker has shown no progress for runtime.call_timeout_s = 9 s in its start"
    )


def test_the_report_says_who_waits_where_everyone_stands_and_what_is_oldest():
    found = [Findings(stacks=f"stack {rank}", log_tail=f"log {rank}") for rank in range(2)]
    text = report_text(
        RuntimeError("what happened"),
        scene(vitals("R"), vitals("", call="abort", is_running=False)),
        findings=found,
        oldest_request="sample 3 of prompt 7",
    )
    for wanted in (
        "what happened\n",
        "waiting: worker 0 for worker 1\n",
        "oldest request in flight: sample 3 of prompt 7\n",
        "running               update             12.5 s",
        "dead                  (abort)",
        "memory of node-a: 1.0 of 64.0 GiB free",
        "worker 0 (pid 100 on node-a): stacks, the innermost call first\nstack 0",
        "worker 1 (pid 101 on node-a): end of its log\nlog 1",
    ):
        assert wanted in text, text


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


def request(index: int) -> Request:
    return Request(
        sample_id=SampleId(7, index),
        prompt_token_ids=(1,) * 8,
        parts=((1,) * 4,),
        start=4,
        max_tokens=20,
        seed=0,
    )


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
    flight.launch(2, [request(0), request(1)])
    clock.now_s += 30
    flight.launch(1, [request(2)])
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
    flight.launch(0, [request(0)])
    assert flight.stuck_s == 0.0
    clock.now_s += 10
    flight.absorb(tick(engine_steps=8))
    clock.now_s += 10
    flight.absorb(tick(engine_steps=0))
    flight.launch(0, [request(1)])
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
