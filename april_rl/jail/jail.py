"""The process that runs the code of a response, one forked child per run: the child closes its
sandbox, reports that, and runs the code.

`sandbox.py` starts it with `python -I -c`. Standard library only.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from april_rl.jail import landlock, seccomp

CAPABILITY_VERSION_3 = 0x20080522
MAX_OUTPUT_BYTES = 16 << 20  # limit of each file, and so of all that is printed
MAX_OPEN_FILES = 64
MAX_TIMERS = 64
MAX_REQUEST_BYTES = 64
MAX_THREADS = 64
LOOK_S = 0.01  # pause between two checks of a program
REPORT = 3  # file descriptor for the report on tests
SOLUTION = "solution"  # the name of the response as a module, for tests that import it
_execute, _parse = exec, compile  # a response may replace these functions in `builtins`


def main(arguments: Sequence[str]) -> None:
    """Read a job (JSON) and run its code once per request, until the control socket is closed.

    The arguments are the descriptors of the control socket and of the job, and the id of the
    process with which it must end. A request is a wall limit in seconds, with the descriptors of
    the input and of the output; the reply is JSON: whether the sandbox closed, the exit code, which
    limit ended the run, and the time it used. With tests the output gets a line `token number` for
    each that passes.
    """
    control_number, job_number, parent = (int(argument) for argument in arguments)
    die_with(parent)
    gc.freeze()  # a child ends in half the time if it does not search the shared objects
    with open(job_number, "rb") as file:
        job = json.load(file)
    with socket.socket(fileno=control_number) as control:
        while True:
            request, files, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 2)
            if not request:
                return
            ready, ready_end = os.pipe()
            host = os.getpid()
            if (child := os.fork()) == 0:
                break
            for number in (*files, ready_end):
                os.close(number)
            reply = _watch(child, ready, cpu_s=job["cpu_s"], wall_s=float(request))
            control.send(json.dumps(reply).encode())
    die_with(host)
    stdin, output = files
    _run(job, stdin, output, ready_end)  # this runs in the child


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that started it ends."""
    landlock.check_call(landlock.libc.prctl(seccomp.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)


def lock_in(job: dict[str, Any]) -> None:
    """Apply all restrictions of the job, from resource limits to the system call filter."""
    _limit(resource.RLIMIT_AS, job["memory_bytes"])
    # A second limit, in case the parent no longer enforces it.
    _limit(resource.RLIMIT_CPU, math.ceil(job["cpu_s"]) + 1)
    _limit(resource.RLIMIT_FSIZE, MAX_OUTPUT_BYTES)
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _limit(resource.RLIMIT_CORE, 0)
    # Each timer takes one of the user's pending signals.
    _limit(resource.RLIMIT_SIGPENDING, MAX_TIMERS)
    drop_capabilities()
    if job["landlock"]:
        landlock.allow_reading_only(job["readable"])
    if job["seccomp"]:
        seccomp.deny_escapes()


def drop_capabilities() -> None:
    """Drop every capability: root has them, and Landlock does not restrict them."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    # Effective, permitted and inheritable capabilities, two words each.
    nothing = (ctypes.c_uint32 * 6)()
    landlock.check_call(landlock.libc.capset(ctypes.byref(header), ctypes.byref(nothing)))


def run_tests(code: str, tests: Sequence[Sequence[Any]], token: str) -> None:
    """Run the response as the module `solution`, then the statements of the tests in it, and exit.

    A test is (source, whether it counts). Report the number of every test that counts and passes.
    Stop when one that does not count fails, since the tests after it build on it.
    """
    solution = _new_module(SOLUTION)
    # After the response has run, no name is looked up: the response may have replaced it.
    listed = [(*test, f"{token} {number}\n".encode()) for number, test in enumerate(tests)]
    is_run, write, leave = _is_run, os.write, os._exit
    if not is_run(code, solution):
        leave(1)
    for source, counts, line in listed:
        has_passed = is_run(source, solution)
        if has_passed and counts:
            write(REPORT, line)
        if not (has_passed or counts):
            break
    leave(0)  # do not wait for threads that the response has left


def run_program(code: str, main_module: dict[str, Any]) -> None:
    """Run the response as a program, which ends as any Python program, except that modules that
    it shares with this process are left alone: taking them down would copy most of their memory.
    """
    status = 1

    def leave() -> None:  # runs last among the exit functions, after the threads have ended
        main_module.clear()  # this closes its files
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None:
                stream.flush()
        os._exit(status)

    atexit.register(leave)
    try:
        exec(compile(code, SOLUTION, "exec"), main_module)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise


def _watch(child: int, ready: int, *, cpu_s: float, wall_s: float) -> dict[str, Any]:
    """Wait until a child has ended or exceeds a limit, counted from the moment its sandbox is
    closed; end it and return the reply.
    """
    with open(ready, "rb") as file:
        is_closed = file.read(1) == b"r"
    start_s, start_cpu_s = time.monotonic(), _cpu_s(child)
    start_wait_s = wait_s = _wait_s(child)
    own_wait_s = _own_wait_s()
    end = os.pidfd_open(child)
    poll = select.poll()
    poll.register(end, select.POLLIN)
    limit = ""
    while not limit:
        last_own_wait_s, own_wait_s = own_wait_s, _own_wait_s()
        has_ended = poll.poll(1000 * LOOK_S)
        used_cpu_s, used_wall_s = _cpu_s(child) - start_cpu_s, time.monotonic() - start_s
        wait_s = max(wait_s, _wait_s(child))  # the kernel forgets the waits of ended threads
        if has_ended:
            break
        limit = "cpu" if used_cpu_s >= cpu_s else "wall" if used_wall_s >= wall_s else ""
        # RLIMIT_NPROC counts all processes of a user, and does not bind root.
        if len(_threads(child)) > MAX_THREADS:
            limit = "threads"
    used_s = used_cpu_s
    if wait_s < math.inf:
        # This process may sleep as the child does, but not longer: that delays the result.
        late_s = _own_wait_s() - last_own_wait_s
        used_s = max(used_s, used_wall_s - (wait_s - start_wait_s) - late_s)
    os.close(end)
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {
        "is_closed": is_closed,
        "exit_code": None if limit else code,
        "limit": limit,
        "used_s": used_s,
    }


def _cpu_s(child: int) -> float:
    """Return the CPU time of a process; the clock's id is built as in clock_getcpuclockid."""
    return time.clock_gettime(~child << 3 | 2)


def _threads(child: int) -> list[str]:
    return os.listdir(f"/proc/{child}/task")


def _wait_s(child: int) -> float:
    """Return how long the threads of a child were ready to run and waited for a core; infinite on a
    kernel that does not count it.
    """
    if not os.path.exists("/proc/self/schedstat"):
        return math.inf
    return sum(_queued_s(f"/proc/{child}/task/{thread}/schedstat") for thread in _threads(child))


def _own_wait_s() -> float:
    return _queued_s("/proc/self/schedstat")


def _queued_s(path: str) -> float:
    """Return the time that a thread was ready to run and waited for a core; 0 if it has ended."""
    with suppress(OSError), open(path, encoding="ascii") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def _run(job: dict[str, Any], stdin: int, output: int, ready: int) -> None:
    has_tests = job["tests"] is not None
    silent = os.open(os.devnull, os.O_WRONLY)
    lock_in(job)
    for number, wanted in ((stdin, 0), (silent if has_tests else output, 1), (silent, 2)):
        # Until here, standard error explains why the sandbox could not be closed.
        os.dup2(number, wanted)
    os.write(ready, b"r")
    os.dup2(output, REPORT)
    os.closerange(REPORT + has_tests, MAX_OPEN_FILES)
    sys.argv = [SOLUTION]
    sys.set_int_max_str_digits(0)  # the limit of time bounds long integers
    for name in [name for name in sys.modules if name.partition(".")[0] == "april_rl"]:
        del sys.modules[name]  # the code must not reach the module that watches it
    main_module = _new_module("__main__")
    if has_tests:
        run_tests(job["code"], job["tests"], job["token"])
    run_program(job["code"], main_module)


def _new_module(name: str) -> dict[str, Any]:
    """Put an empty module where imports find it, and return its namespace."""
    sys.modules[name] = types.ModuleType(name)
    return vars(sys.modules[name])


def _limit(kind: int, wanted: int) -> None:
    hard = resource.getrlimit(kind)[1]
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (allowed, allowed))


def _is_run(source: str, namespace: dict[str, Any]) -> bool:
    """Return whether the source runs to its end without raising anything, not even SystemExit."""
    with suppress(BaseException):
        _execute(_parse(source, SOLUTION, "exec"), namespace)
        return True
    return False
