"""The error and the report that a user reads when workers have failed."""

from cluster_snapshots import BEFORE_START, snapshot, status
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from april_rl.run.supervision.diagnosis import (
    call_error,
    death_error,
    memory_error,
    no_progress_error,
)
from april_rl.run.supervision.failures import WorkerMemoryError, read_failure
from april_rl.run.supervision.node_monitor import NO_REPLY, WorkerTrace
from april_rl.run.supervision.stall_report import report_text


def test_the_report_says_that_workers_wait_for_the_dead_then_the_stopped_then_the_slowest():
    """Fails when the order differs, or a worker between two calls is reported as waiting."""
    even, behind, idle = status(), status(call_beats=2), status(is_running=False)
    stopped, dead = status("T"), status("")
    assert snapshot(even, behind, stopped, dead).who_waits() == "workers 0, 1, 2 wait for worker 3"
    assert snapshot(even, behind, stopped).who_waits() == "workers 0, 1 wait for worker 2"
    assert snapshot(even, behind, even).who_waits() == "workers 0, 2 wait for worker 1"
    assert snapshot(even, even, idle).who_waits() == "workers 0, 1 wait for worker 2"
    assert snapshot(even, even).who_waits() == ""
    assert snapshot(idle, idle).who_waits() == ""


def test_a_death_for_lack_of_memory_is_named_with_the_settings_to_lower():
    """The kernel only counts the kill; the rest of the message is Ray's text."""
    assert not isinstance(death_error(snapshot(status("")), 0), WorkerMemoryError)
    by_kernel = death_error(snapshot(status("", call="advance", oom_kills=1)), 0)
    assert isinstance(by_kernel, WorkerMemoryError)
    assert "worker 0 (pid 100 on node-a) ran out of memory in advance" in str(by_kernel)
    assert "(the kernel killed 1 of its node's processes for lack of memory)" in str(by_kernel)
    assert "It held up to 5.00 GiB; its node has 1.0 of 64.0 GiB free now." in str(by_kernel)
    assert "engine.kv_cache_gib" in str(by_kernel)
    said = "1 worker(s) were killed due to the node running low on memory.\nMore\nof it"
    for error in (OutOfMemoryError("killed"), RayActorError(error_msg=said)):
        by_ray = call_error(snapshot(status("")), 0, read_failure(error))
        assert isinstance(by_ray, WorkerMemoryError), error
    assert "(1 worker(s) were killed due to the node running low on memory.)" in str(by_ray)


def test_a_dead_worker_is_named_with_the_call_it_was_in_or_after():
    assert "died in update:" in str(death_error(snapshot(status("")), 0))
    assert "died after update:" in str(death_error(snapshot(status("", is_running=False)), 0))
    never_called = status("", call="", is_running=False)
    assert "died before its first call:" in str(death_error(snapshot(never_called), 0))


def test_when_all_workers_of_a_node_are_dead_the_message_names_rays_process():
    """They end with their raylet. Fails when one of them is blamed as if it had died by itself."""
    one_of_two, the_only_one = snapshot(status(""), status()), snapshot(status(""))
    assert "raylet" not in str(death_error(one_of_two, 0)) + str(death_error(the_only_one, 0))
    both = snapshot(status(""), status(""))
    assert "like all workers of its node: they end with" in str(death_error(both, 0))


def test_the_memory_of_a_silent_node_is_shown_as_unknown():
    no_answer = snapshot(status(NO_REPLY, node_bytes=0))
    error = memory_error(no_answer, 0, "reason")
    assert "It held up to 5.00 GiB. " in str(error)
    traces = [WorkerTrace(stacks="", log_tail="")]
    text = report_text(error, no_answer, traces=traces)
    assert "memory of node-a: unknown" in text
    assert "unknown: no answer from its node" in text


def test_rays_guesses_about_a_death_are_left_out_and_its_facts_are_shown():
    """Before workers are watched, only Ray knows of a death. These are Ray's texts."""
    said = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Worker\n"
        "\tactor_id: edbb\n\tpid: 25603\n\tnamespace: 568b\n\tip: 10.0.0.1\nThe actor is dead "
        "because its worker process has died. Worker exit detail: End of file. Some common causes "
        "include: (1) the process was killed by the OOM killer, consider --enable-isolation.\n"
        "The actor never ran."
    )
    error = call_error(BEFORE_START, None, read_failure(RayActorError(error_msg=said)))
    assert str(error) == (
        "a worker died during start-up: The actor died unexpectedly before finishing this task.\n"
        "\tpid: 25603\n\tip: 10.0.0.1\nThe actor is dead because its worker process has died. "
        "Worker exit detail: End of file.\nThe actor never ran."
    )
    text = report_text(error, BEFORE_START, traces=[])
    assert "the state of the workers is unknown" in text
    assert "beats" not in text


def test_messages_of_every_allocator_are_read_as_lack_of_memory():
    """From torch on CUDA and CPU, and from Python. Fails when only one of the classes is
    recognised.
    """
    for cause in (
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ):
        error = RayTaskError("update", "its traceback", cause)
        assert read_failure(error).is_out_of_memory, cause
    other = RayTaskError("update", "its traceback", IndexError("row"))
    assert not read_failure(other).is_out_of_memory


def test_messages_advise_on_the_failed_call_even_before_workers_are_watched():
    assert "learner.max_tokens" in str(memory_error(snapshot(status()), 0, "reason"))
    assert "during start-up" in str(memory_error(BEFORE_START, None, "reason"))
    error = no_progress_error(BEFORE_START, None, key="6 · runtime.stall_timeout_s", limit_s=9)
    assert str(error).startswith(
        "a worker made no progress during start-up for 6 · runtime.stall_timeout_s = 9 s"
    )


def test_the_report_shows_who_waits_and_every_workers_state_stacks_and_log():
    traces = [WorkerTrace(stacks=f"stack {rank}", log_tail=f"log {rank}") for rank in range(2)]
    text = report_text(
        RuntimeError("what happened"),
        snapshot(status("R"), status("", call="abort", is_running=False)),
        traces=traces,
    )
    for wanted in (
        "what happened\n",
        "waiting: worker 0 waits for worker 1\n",
        "running               update             12.5 s ago",
        "dead                  (abort)",
        "memory of node-a: 1.0 of 64.0 GiB free",
        "worker 0 (pid 100 on node-a): stacks of all threads, innermost call first\nstack 0",
        "worker 1 (pid 101 on node-a): end of its log\nlog 1",
    ):
        assert wanted in text, text
