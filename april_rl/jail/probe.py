"""The self-test of a sandbox: code in it tries to get out, and this module checks what arrived."""

from __future__ import annotations

import os
import secrets
import select
import socket
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from april_rl.jail.sandbox import GIB, Sandbox, SandboxError

TIMEOUT_S = 10.0  # time limit of an attempt that ends by itself
LOOP_S = 0.5
SMALLEST = "bytearray(1 << 24)"
TRIED = "tried everything"

ESCAPE = """
import ctypes, errno, fcntl, os, signal, socket, sys
from contextlib import suppress

with suppress(OSError), open({written!r}, "w") as file:
    file.write("out")
try:
    os.removexattr(os.open(sys.executable, os.O_RDONLY), "user.april_rl_self_test")
except OSError as error:
    if error.errno == errno.ENODATA:
        print({writes!r})
with suppress(OSError):
    print(open({secret!r}).read())
with suppress(OSError):
    socket.create_connection(("127.0.0.1", {tcp}), timeout=1.0)
with suppress(OSError):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"out", ("127.0.0.1", {udp}))
with suppress(OSError):
    socket.socket(socket.AF_UNIX).connect({unix!r})
with suppress(OSError):
    os.chdir({folder!r})  # the path of a socket must be short
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"out", "datagrams")
for send in (
    lambda: os.kill({parent}, 0),
    lambda: fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {parent}),  # which SIGIO or SIGKILL gets
):
    with suppress(OSError):
        send()
        print({signals!r})
if ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0) == 0:  # PR_SET_PDEATHSIG as it is
    print({outlives!r})
with suppress(OSError):
    if os.fork() == 0:
        os._exit(0)
    print({forks!r})
with suppress(MemoryError):
    bytearray({too_many_bytes})
    print({memory!r})
print({tried!r})
"""


class Threat(StrEnum):
    """Actions that code might take and its task does not need."""

    WRITES = "writing files"
    READS = "reading files"
    NETWORK = "the network"
    SIGNALS = "signals to other processes"
    FORKS = "new processes"
    OUTLIVES = "outliving the reward process"
    MEMORY = "much memory"
    LOOPS = "endless loops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Actions that a sandbox stopped in its self-test."""

    sandbox: Sandbox
    stopped: frozenset[Threat]

    def describe(self) -> str:
        """Return one line: the level, what it stops and what it does not."""
        passed = ", ".join(threat for threat in Threat if threat not in self.stopped)
        stops = ", ".join(threat for threat in Threat if threat in self.stopped) or "nothing"
        lets = f"; it does not stop {passed}" if passed else ""
        return f"The {self.sandbox.level} sandbox stops {stops}{lets}."


def check_isolation(sandbox: Sandbox) -> Isolation:
    """Return the result of a sandbox's self-test; raise SandboxError unless it stops everything."""
    try:
        isolation = probe(sandbox)
        failure = "" if isolation.stopped == set(Threat) else isolation.describe()
    except SandboxError as error:
        failure = str(error)
    if not failure:
        return isolation
    raise SandboxError(
        f"This machine does not isolate code that a model wrote, so it is not run. {failure} Use a "
        "kernel with Landlock (Linux 5.13 or later, on x86-64 or aarch64; a container must allow "
        "it), or, if the machine holds nothing of value, set sandbox: none in the function's "
        "args."
    )


def probe(sandbox: Sandbox) -> Isolation:
    """Return what a sandbox stops, by trying; raise SandboxError when no code can run in it."""
    check_start(sandbox)
    happened = _try_threats(sandbox)
    if sandbox.run("while True: pass", timeout_s=LOOP_S).exit_code is not None:
        happened.add(Threat.LOOPS)
    return Isolation(sandbox=sandbox, stopped=frozenset(set(Threat) - happened))


def check_start(sandbox: Sandbox) -> None:
    """Raise SandboxError when not even the smallest program runs in a sandbox."""
    finished = sandbox.run(SMALLEST, timeout_s=TIMEOUT_S)
    if finished.exit_code != 0:
        raise SandboxError(
            f"The smallest program fails in the {sandbox.level} sandbox (exit code "
            f"{finished.exit_code}) with memory_gib={sandbox.memory_gib:g}; give it more."
        )


def _try_threats(sandbox: Sandbox) -> set[Threat]:
    secret = secrets.token_hex()
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(b"\0" + secrets.token_bytes(8))  # an abstract name, which lies in no folder
        unix.listen()
        opened = os.open(folder, os.O_PATH)
        datagrams.bind(f"/proc/self/fd/{opened}/datagrams")
        os.close(opened)
        written = Path(folder, "written")
        Path(folder, "secret").write_text(secret)
        attempts = ESCAPE.format(
            written=str(written),
            secret=str(Path(folder, "secret")),
            tcp=tcp.getsockname()[1],
            udp=udp.getsockname()[1],
            unix=unix.getsockname(),
            folder=folder,
            parent=os.getpid(),
            too_many_bytes=int(2 * sandbox.memory_gib * GIB),
            tried=TRIED,
            **{threat.name.lower(): threat.name for threat in Threat},
        )
        finished = sandbox.run(attempts, timeout_s=TIMEOUT_S)
        happened = {
            Threat.WRITES: written.exists(),
            Threat.READS: secret in finished.output,
            Threat.NETWORK: bool(select.select([tcp, udp, unix, datagrams], [], [], 0)[0]),
        }
    said = finished.output.splitlines()
    if TRIED not in said:
        raise SandboxError(
            f"The {sandbox.level} sandbox ended its own self-test (exit code {finished.exit_code})."
        )
    return {threat for threat in Threat if happened.get(threat, False) or threat.name in said}
