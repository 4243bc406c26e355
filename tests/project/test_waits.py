"""Every place where the controller waits is listed here, with what a signal does there."""

import ast

from source_tree import PACKAGE

# Rooms whose code runs in the controller, and modules there that run in other processes.
ROOMS = (
    *("training/trainer.py", "training/updates.py", "training/rollout/"),
    *("training/runtime/engines.py", "training/runtime/workers.py"),
    *("task/teacher_server.py", "task/evaluation/", "task/processes/"),
    *("task/rewards/pool.py", "task/environments/pool.py", "task/environments/child.py"),
    *("run/checkpointing/", "run/supervision/"),
)
ELSEWHERE = (
    "task/processes/child_process.py",
    "run/supervision/heartbeat.py",
    "run/supervision/node_monitor.py",
)
LOOKS = "it calls `look` at least every second, which raises after a signal"
AT_THE_START = "before the first step, when a signal raises at once"
IN_A_THREAD = "in a thread of its own"
WAITS = {
    "task/processes/mailbox.py _advance": LOOKS,  # for its caller `collect`
    "task/teacher_server.py _wait": LOOKS,
    "task/teacher_server.py close": "the thread has been told to end",
    "task/environments/child.py _receive": IN_A_THREAD,
    "task/environments/child.py kill": "the process was sent SIGKILL",
    "task/rewards/pool.py _stop": "the pool was told to end its processes",
    "task/rewards/pool.py _on_ended": "the future is done",
    "task/rewards/pool.py _on_broken": "one, two and four seconds at most",
    "task/rewards/pool.py _wait_for": AT_THE_START,
    "run/checkpointing/checkpointer.py finish": "the last checkpoint, for which the signal waits",
    "run/checkpointing/run_lock.py _acquire": AT_THE_START,
    "run/checkpointing/run_lock.py _free": AT_THE_START,
    "run/checkpointing/run_lock.py own": "the thread has been told to end",
    "run/supervision/cluster_monitor.py _replies": "a limit of seconds",
    "run/supervision/watchdog.py _collect_ended": "an update or a tick, which ends as a whole",
    "run/supervision/watchdog.py _raise_failure": "at most a second, when a worker has failed",
    "training/runtime/engines.py wait": "milliseconds, for the ticks of several engines",
}


def test_the_waits_of_the_controller_are_known() -> None:
    """Fails for a new wait: give it a `look`, or say here why it needs none."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(ROOMS) and name not in ELSEWHERE:
            for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(function, ast.FunctionDef) and any(map(waits, ast.walk(function))):
                    found.add(f"{name} {function.name}")
    assert found == WAITS.keys()


def waits(node: ast.AST) -> bool:
    """Return whether a node is a call that may take long."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if ast.unparse(node).endswith("timeout=0)"):
        return False
    called, method = ast.unparse(node.func), node.func.attr
    has_limit = any(each.arg == "timeout" for each in node.keywords)
    is_wait = called in ("ray.wait", "time.sleep", "futures.wait")
    is_join = method == "join" and (not node.args or "process" in called)
    return is_wait or (method == "get" and has_limit) or method == "result" or is_join
