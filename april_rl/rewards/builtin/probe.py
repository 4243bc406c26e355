"""The self-test of a sandbox: code in it tries to get out, and this module checks what arrived."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from april_rl.rewards.builtin.sandbox import (
    SLACK_PROCESSES,
    Level,
    Sandbox,
    SandboxError,
)

TIMEOUT_S = 10.0  # for an attempt that ends by itself
LOOP_S = 0.5
DATAGRAM = b"out"
SMALLEST = "bytearray(1 << 24)"
TRIED = "tried everything"

ESCAPE = """
import os, socket
from contextlib import suppress

with suppress(OSError), open({written!r}, "w") as file:
    file.write("out")
with suppress(OSError):
    print(open({secret!r}).read())
with suppress(OSError):
    socket.create_connection(("127.0.0.1", {tcp}), timeout=1.0)
with suppress(OSError):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto({datagram!r}, ("127.0.0.1", {udp}))
with suppress(OSError):
    socket.socket(socket.AF_UNIX).connect({unix!r})
with suppress(OSError):
    os.kill({parent}, 0)
    print("signal sent")
print({tried!r})
"""
FORKS = """
import os, signal

for number in range(2 * {allowed} + 1):
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        signal.pause()
    print(number, flush=True)
print({tried!r})
"""
MEMORY = """
try:
    print(len(bytearray({num_bytes})))
except MemoryError:
    pass
print({tried!r})
"""


class Threat(StrEnum):
    """What code might do that its task does not need."""

    WRITES = "writing files"
    READS = "reading files"
    NETWORK = "the network"
    SIGNALS = "signals to other processes"
    FORKS = "many processes"
    MEMORY = "much memory"
    LOOPS = "endless loops"


ISOLATION = {Threat.WRITES, Threat.READS, Threat.NETWORK}  # without these no untrusted code


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What a sandbox stopped in its self-test."""

    sandbox: Sandbox
    stopped: frozenset[Threat]

    @property
    def is_safe(self) -> bool:
        """Return whether untrusted code may run in it: it reaches no foreign files and no
        network.
        """
        return self.stopped >= ISOLATION

    def describe(self) -> str:
        """Return one line: the level, what it stops and what it does not."""
        passed = [threat for threat in Threat if threat not in self.stopped]
        stops = ", ".join(threat for threat in Threat if threat in self.stopped) or "nothing"
        lets = f"; it does not stop {', '.join(passed)}" if passed else ""
        return f"The {self.sandbox.level} sandbox stops {stops}{lets}."


def strongest(levels: Iterable[Level], *, memory_gib: float) -> Isolation:
    """Return the first of the levels that isolates files and network, after its self-test.

    Raise SandboxError with the result of each level when none does.
    """
    failures = []
    for level in levels:
        try:
            isolation = probe(Sandbox(level=level, memory_gib=memory_gib))
        except SandboxError as error:
            failures.append(str(error))
            continue
        if isolation.is_safe:
            return isolation
        failures.append(isolation.describe())
    raise SandboxError(
        "No sandbox on this machine isolates files and network, so code that a model wrote is not "
        f"run. {' '.join(failures)} Install bubblewrap where user namespaces are allowed, use a "
        "kernel with Landlock (Linux 5.13 or later, allowed by the container), or, where the "
        "machine holds nothing of value, say sandbox: none in the function's args."
    )


def probe(sandbox: Sandbox) -> Isolation:
    """Return what a sandbox stops, by trying; takes about a second.

    Raise SandboxError when code cannot run in it at all.
    """
    check_start(sandbox)
    stopped = _tried_to_escape(sandbox) | _tried_to_exhaust(sandbox)
    return Isolation(sandbox=sandbox, stopped=frozenset(stopped))


def check_start(sandbox: Sandbox) -> None:
    """Raise SandboxError when not even the smallest program runs in a sandbox."""
    finished = sandbox.run(SMALLEST, timeout_s=TIMEOUT_S)
    if finished.exit_code != 0:
        raise SandboxError(
            f"The smallest program fails in the {sandbox.level} sandbox (exit code "
            f"{finished.exit_code}) with memory_gib={sandbox.memory_gib:g}; give it more."
        )


def _tried_to_escape(sandbox: Sandbox) -> set[Threat]:
    """Return what it stops of writing, reading, connecting and sending signals."""
    secret = secrets.token_hex()
    with tempfile.TemporaryDirectory() as folder, _listeners() as (tcp, udp, unix):
        written = Path(folder, "written")
        Path(folder, "secret").write_text(secret)
        output = _output(
            sandbox,
            ESCAPE.format(
                written=str(written),
                secret=str(Path(folder, "secret")),
                tcp=tcp.getsockname()[1],
                udp=udp.getsockname()[1],
                unix=unix.getsockname(),
                parent=os.getpid(),
                datagram=DATAGRAM,
                tried=TRIED,
            ),
        )
        escaped = {
            Threat.WRITES: written.exists(),
            Threat.READS: secret in output,
            Threat.NETWORK: _is_reached(tcp) or _is_reached(unix) or _has_got(udp),
            Threat.SIGNALS: "signal sent" in output,
        }
    return {threat for threat, happened in escaped.items() if not happened}


def _tried_to_exhaust(sandbox: Sandbox) -> set[Threat]:
    """Return what it stops of starting many processes, using much memory and looping forever."""
    forks = _output(sandbox, FORKS.format(allowed=SLACK_PROCESSES, tried=TRIED))
    num_bytes = int(2 * sandbox.memory_gib * (1 << 30))
    memory = _output(sandbox, MEMORY.format(num_bytes=num_bytes, tried=TRIED))
    loop = sandbox.run("while True:\n    pass", timeout_s=LOOP_S)
    happened = {
        Threat.FORKS: len(forks.splitlines()) - 1 > SLACK_PROCESSES,
        Threat.MEMORY: str(num_bytes) in memory,
        Threat.LOOPS: loop.exit_code is not None,
    }
    return {threat for threat, has_happened in happened.items() if not has_happened}


def _output(sandbox: Sandbox, attempts: str) -> str:
    """Return what the attempts printed; raise SandboxError when they did not finish."""
    finished = sandbox.run(attempts, timeout_s=TIMEOUT_S)
    if TRIED not in finished.output:
        raise SandboxError(
            f"The {sandbox.level} sandbox ended its own self-test (exit code {finished.exit_code})."
        )
    return finished.output


@contextmanager
def _listeners() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """Open a TCP, a UDP and an abstract Unix socket that code outside a sandbox can reach."""
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(b"\0" + secrets.token_bytes(8))
        unix.listen()
        for opened in (tcp, udp, unix):
            opened.setblocking(False)
        yield tcp, udp, unix


def _is_reached(listener: socket.socket) -> bool:
    """Return whether somebody has connected."""
    with suppress(BlockingIOError):
        listener.accept()[0].close()
        return True
    return False


def _has_got(datagrams: socket.socket) -> bool:
    """Return whether a datagram has come."""
    with suppress(BlockingIOError):
        return datagrams.recv(len(DATAGRAM)) == DATAGRAM
    return False
