"""What is said of workers that have failed: the error, and the report."""

from __future__ import annotations

from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from scenes import UNMET, scene, vitals

from april_rl.runtime.supervision.diagnosis import died, failed, out_of_memory, silent
from april_rl.runtime.supervision.failures import WorkerMemoryError, failure_of
from april_rl.runtime.supervision.node_monitor import UNSEEN, Findings
from april_rl.runtime.supervision.stall_report import report_text


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
    assert "killed there for want of memory since the start: 1)" in str(by_kernel)
    assert "It held 5.00 GiB; 1.0 of 64.0 GiB of its machine are free now." in str(by_kernel)
    assert "engine.kv_cache_gib" in str(by_kernel)
    said = "1 worker(s) were killed due to the node running low on memory.\nMore\nof it"
    for error in (OutOfMemoryError("killed"), RayActorError(error_msg=said)):
        by_ray = failed(scene(vitals("")), 0, failure_of(error))
        assert isinstance(by_ray, WorkerMemoryError), error
    assert "(1 worker(s) were killed due to the node running low on memory.)" in str(by_ray)


def test_when_all_workers_of_a_node_are_dead_the_node_is_named():
    """They end with their raylet. Fails when one of them is blamed as if it were alone."""
    alone, lone = scene(vitals(""), vitals()), scene(vitals(""))
    assert "raylet" not in str(died(alone, 0)) + str(died(lone, 0))
    assert "like all workers of its node: they end with" in str(died(scene(*[vitals("")] * 2), 0))


def test_of_a_machine_that_does_not_answer_no_memory_is_told():
    """Fails when it has 0.0 GiB."""
    silent_node = scene(vitals(), total_bytes=0)
    error = out_of_memory(silent_node, 0, "said")
    assert "It held 5.00 GiB. " in str(error)
    findings = [Findings(stacks="", log_tail="")]
    text = report_text(error, silent_node, findings=findings, oldest_request="")
    assert "memory of node-a: not known" in text


def test_what_ray_guesses_of_a_death_is_left_out_and_what_it_knows_is_told():
    """Of a worker that nobody has met, only Ray knows. These are its words."""
    said = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Worker\n"
        "\tactor_id: edbb\n\tpid: 25603\n\tnamespace: 568b\n\tip: 10.0.0.1\nThe actor is dead "
        "because its worker process has died. Worker exit detail: End of file. Some common causes "
        "include: (1) the process was killed by the OOM killer, consider --enable-isolation.\n"
        "The actor never ran."
    )
    error = failed(UNMET, None, failure_of(RayActorError(error_msg=said)))
    assert str(error) == (
        "a worker died in its start: The actor died unexpectedly before finishing this task.\n"
        "\tpid: 25603\n\tip: 10.0.0.1\nThe actor is dead because its worker process has died. "
        "Worker exit detail: End of file.\nThe actor never ran."
    )
    text = report_text(error, UNMET, findings=[], oldest_request="")
    assert "nothing is known of them" in text
    assert "beats" not in text


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
    assert "in its start" in str(out_of_memory(UNMET, None, "said"))
    assert str(silent(UNMET, None, key="runtime.call_timeout_s", limit_s=9)).startswith(
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
