"""Attacks on the sandbox for a model's code: attempts to get out of it and to exhaust it.

The attempts run with the Landlock of every kernel version up to this one, and without Landlock.
Without it, only attempts that Landlock alone stops may succeed.
"""

import os
import secrets
import select
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_rewards_sandbox import in_jail

from april_rl.jail import landlock, seccomp
from april_rl.jail.sandbox import Sandbox

NONE = Sandbox(level="none")

PRELUDE = """
import asyncio, ctypes, errno, fcntl, mmap, multiprocessing, os, resource, signal, socket, struct
import subprocess, sys, threading

libc = ctypes.CDLL(None, use_errno=True)
OPEN = []
for number in range(3, 64):
    try:
        OPEN.append(os.fstat(number))
    except OSError:
        pass
OUT, PARENT, FOREIGN = {out!r}, {parent}, {foreign!r}
NAMES = "out", {abstract!r}  # sockets outside, one of them in the folder OUT

def c(name, *arguments):
    result = getattr(libc, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result

def told(attempt):
    try:
        return repr(attempt())[:40] and "done"
    except MemoryError:
        return "ENOMEM"
    except OSError as error:
        return errno.errorcode.get(error.errno, repr(error))
    except BaseException as error:
        return type(error).__name__
    finally:
        os.closerange(3, 64)

def opened(path=FOREIGN):
    return os.open(path, os.O_RDONLY)

def timer():
    event = struct.pack("Qii48x", 0, signal.SIGALRM, 0)
    return c("timer_create", 1, event, ctypes.byref(ctypes.c_void_p()))

def datagrams(kind):
    os.chdir(OUT)
    sender = socket.socketpair(socket.AF_UNIX, kind)[0]
    for name in NAMES:
        sender.sendto(b"out", name)
        socket.send_fds(sender, [b"out"], [1], 0, name)
        sender.connect(name)

def between(pair):
    pair[0].sendall(b"in")
    socket.send_fds(pair[0], [b"in"], [1])
    return pair[1].recv(4)

def own_socket(request):
    return fcntl.ioctl(socket.socketpair()[0], request, struct.pack('i', PARENT))
"""

# Landlock forbids these; without it they succeed.
FILES = {
    "read a file": "open(OUT + '/read').read()",
    "list a folder": "os.listdir(OUT)",
    "read its environment in /proc": "open('/proc/self/environ').read()",
    "read the command line of its parent": "open(f'/proc/{PARENT}/cmdline').read()",
    "write a new file": "open(OUT + '/new', 'w')",
    "write a file that is there": "open(OUT + '/write', 'r+')",
    "append to a file": "open(OUT + '/write', 'a')",
    "make a folder": "os.mkdir(OUT + '/folder')",
    "make a symbolic link": "os.symlink('/', OUT + '/link')",
    "make a hard link": "os.link(OUT + '/read', OUT + '/hard')",
    "make a pipe with a name": "os.mkfifo(OUT + '/fifo')",
    "delete a file": "os.unlink(OUT + '/delete')",
    "rename a file": "os.rename(OUT + '/rename', OUT + '/renamed')",
    "follow a link in /proc": "os.readlink('/proc/self/cwd') and os.listdir('/proc/self/root')",
}
# The filter forbids these on every kernel with this error. Their arguments do no harm if it fails.
SYSTEM_CALLS = {
    **{
        f"a socket of the family {family}": f"socket.socket({family}, {kind})"
        for family, kind in ((1, 1), (2, 1), (2, 2), (10, 1), (16, 3), (17, 3), (38, 5), (40, 1))
    },
    "datagrams to sockets outside": "datagrams(socket.SOCK_DGRAM)",
    "datagrams of a raw pair": "datagrams(socket.SOCK_RAW)",
    "datagrams that do not wait": "datagrams(socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)",
    "packets to sockets outside": "datagrams(socket.SOCK_SEQPACKET)",
    "a pair of another family": "socket.socketpair(30, socket.SOCK_STREAM)",
    "connect a pair": "socket.socketpair()[0].connect(NAMES[1])",
    "give a pair a name": "socket.socketpair()[0].bind(NAMES[1] + b'a')",
    "listen": "socket.socketpair()[0].listen()",
    "accept": "socket.socketpair()[0].accept()",
    "io_uring": "c('syscall', 425, 1, ctypes.create_string_buffer(120))",
    "fork": "os.fork()",
    "vfork": "c('vfork')",
    "posix_spawn": "os.posix_spawn('/usr/bin/id', ['id'], {})",
    "subprocess": "subprocess.run(['/usr/bin/id'])",
    "exec": "os.execv('/usr/bin/id', ['id'])",
    "exec of a descriptor": "os.execve(opened(sys.executable), ['a'], {})",
    "a new user namespace": "c('unshare', 0x10000000)",
    "kill its parent": "os.kill(PARENT, 0)",
    "kill its process group": "os.killpg(0, 0)",
    "kill everything": "os.kill(-1, 0)",
    "queue a signal": "c('sigqueue', PARENT, 0, None)",
    "signal a thread": "c('tgkill', PARENT, PARENT, 0)",
    "open its parent": "os.pidfd_open(PARENT)",
    "signal through a descriptor": "c('syscall', 424, 0, 0, 0, 0)",
    "take a descriptor of its parent": "c('syscall', 438, 0, 0, 0)",
    "ptrace": "c('ptrace', 16, PARENT, 0, 0)",
    "read the memory of its parent": "c('process_vm_readv', PARENT, 0, 0, 0, 0, 0)",
    "change the limits of its parent": "c('prlimit', PARENT, 0, None, None)",
    "slow its parent down": "os.setpriority(os.PRIO_PROCESS, PARENT, 19)",
    "move its parent to a core": "os.sched_setaffinity(PARENT, {0})",
    "SIGIO: own a pipe": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, PARENT)",
    "SIGIO: choose SIGKILL": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETSIG, 9)",
    "SIGIO: own a pipe, extended": "fcntl.fcntl(os.pipe()[0], 15, struct.pack('ii', 1, PARENT))",
    "SIGIO: own a socket (FIOSETOWN)": "own_socket(0x8901)",
    "SIGIO: own a socket (SIOCSPGRP)": "own_socket(0x8902)",
    "make others wait for a lease": "fcntl.fcntl(opened(), 1024, fcntl.F_WRLCK)",
    "lock a file": "fcntl.flock(opened(), fcntl.LOCK_SH)",
    "lock a part of a file": "fcntl.lockf(opened(), fcntl.LOCK_SH)",
    "make others wait for the disk": "c('syscall', SYNC)",
    "make others wait for a file system": "c('syncfs', opened())",
    "large pipes": "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",
    "fork in the second numbering of x86-64": "c('syscall', 0x40000000 + 57)",
    "take back its parent-death signal": "c('prctl', 1, 0, 0, 0, 0)",
    "set an attribute": "os.setxattr(FOREIGN, 'user.a', b'', os.XATTR_REPLACE)",
    "set an attribute of a link": "c('lsetxattr', FOREIGN.encode(), b'user.a', 0, 0, 2)",
    "set an attribute by descriptor": "os.setxattr(opened(), 'user.a', b'', os.XATTR_REPLACE)",
    "remove an attribute": "os.removexattr(FOREIGN, 'user.a')",
    "remove an attribute of a link": "os.removexattr(FOREIGN, 'user.a', follow_symlinks=False)",
    "remove an attribute by descriptor": "os.removexattr(opened(), 'user.a')",
    "change flags of a file": "fcntl.ioctl(opened(), 0x40086602, 0)",
    "truncate": "os.truncate(OUT + '/write', 0)",
    "change a mode": "os.chmod(FOREIGN, os.stat(FOREIGN).st_mode)",
    "change a mode by descriptor": "os.fchmod(opened(), os.stat(FOREIGN).st_mode)",
    "change an owner": "os.chown(FOREIGN, -1, -1)",
    "change an owner of a link": "os.lchown(FOREIGN, -1, -1)",
    "change times": "os.utime(FOREIGN, (os.stat(FOREIGN).st_atime,) * 2)",
    "large buffers of sockets": "socket.socketpair()[0].setsockopt(1, 7, 1 << 26)",
    "2 GiB of shared memory": "c('shmget', 0, 2 << 30, 0o1600)",
    "a file in memory": "os.memfd_create('a')",
    "attach shared memory of others": "c('shmat', -1, None, 0)",
    "delete shared memory of others": "c('shmctl', -1, 0, None)",
    "delete semaphores of others": "c('semctl', -1, 0, 0)",
    "delete messages of others": "c('msgctl', -1, 0, None)",
    "delete a queue of others": "c('syscall', MQ_UNLINK, b'april_rl')",
    "watch files": "c('inotify_init1', 0)",
    "watch file systems": "c('fanotify_init', 0, 0)",
    "load a program into the kernel": "c('syscall', BPF, 0, 0, 0)",
    "measure others": "c('syscall', PERF, 0, 0, 0, 0, 0)",
}
# Calls that the filter does not know fail with ENOSYS, as on an older kernel.
MISSING_CALLS = {
    "clone3": "c('syscall', 435, 0, 0)",
    "set an attribute (setxattrat)": "c('syscall', 463, -100, 0, 0, 0, 0, 0)",
    "remove an attribute (removexattrat)": "c('syscall', 466, -100, 0, 0, 0)",
    "change attributes (file_setattr)": "c('syscall', 469, -100, 0, 0, 0, 0)",
    "a secret file in memory": "c('syscall', 447, 0)",
}
# Limits forbid these, with and without Landlock; the last four are what programs need.
LIMITS = {
    "other descriptors": ("1 / len(OPEN)", "ZeroDivisionError"),
    "2 GiB of heap": ("len(bytearray(2 << 30))", "ENOMEM"),
    "2 GiB of shared map": ("mmap.mmap(-1, 2 << 30)", "ENOMEM"),
    "1 GiB of output": ("os.ftruncate(1, 1 << 30)", "EFBIG"),
    "200 timers": ("[timer() for _ in range(200)]", "EAGAIN"),
    "100 open files": ("[opened() for _ in range(100)]", "EMFILE"),
    "raise a limit": ("resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "ValueError"),
    "threads": ("threading.Thread(target=print).start()", "done"),
    "an event loop": ("asyncio.run(asyncio.sleep(0))", "done"),
    "a thread of an event loop": ("asyncio.run(asyncio.to_thread(print))", "done"),
    "a pair of sockets": ("between(socket.socketpair())", "done"),
}


@pytest.mark.skipif(not seccomp.is_supported(), reason="this machine filters no system calls")
@pytest.mark.parametrize("abi", range(landlock.abi_version() + 1))
def test_attempts_to_get_out_end_with_the_expected_error(
    abi: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("read", "write", "delete", "rename"):
        (tmp_path / name).write_text("foreign")
    attempts = {n: text for n, (text, _) in LIMITS.items()} | SYSTEM_CALLS | MISSING_CALLS | FILES
    column = seccomp.ARCHITECTURES.index(os.uname().machine)
    numbers = {"MQ_UNLINK": (241, 181), "BPF": (321, 280), "PERF": (298, 241), "SYNC": (162, 81)}
    abstract = b"\0" + secrets.token_bytes(8)
    program = PRELUDE.format(
        out=str(tmp_path), parent=os.getpid(), foreign=os.__file__, abstract=abstract
    )
    program += "".join(f"{name} = {of[column]}\n" for name, of in numbers.items())
    for name, text in attempts.items():
        program += f"print({name!r}, told(lambda: {text}), sep=' -> ')\n"
    in_jail(
        monkeypatch, f"from april_rl.jail import landlock; landlock.abi_version = lambda: {abi}"
    )
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    level = "landlock" if abi else "none"
    with ExitStack() as stack:
        outside = [
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) for _ in range(2)
        ]
        outside[0].bind("out")
        outside[1].bind(abstract)
        finished = Sandbox(level=level).run(program, timeout_s=60.0)
        assert select.select(outside, [], [], 0)[0] == []
    results = dict(line.split(" -> ", 1) for line in finished.output.splitlines() if line)
    expected = {name: error for name, (_, error) in LIMITS.items()}
    expected |= dict.fromkeys(SYSTEM_CALLS, "EPERM") | dict.fromkeys(MISSING_CALLS, "ENOSYS")
    expected |= dict.fromkeys(FILES, "EACCES" if abi else "done")
    assert results == expected
    assert ((tmp_path / "new").exists(), (tmp_path / "delete").exists()) == (abi == 0, abi > 0)


IGNORE_SIGNALS = """
import signal
for number in set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: pass
"""
BUSY_THREADS = """
import threading
for _ in range(16):
    threading.Thread(target=exec, args=("while True: pass",)).start()
"""
LAST_THREAD = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""
SLEEPING_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
RECURSION = "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()"
EXHAUSTING = {  # attempts and how they may end; None: a time limit ends them
    "endless output": ("while True: print('x' * 100000)", {1, 120}),
    "ignored signals": (IGNORE_SIGNALS, {None}),
    "busy threads": (BUSY_THREADS, {None}),
    "a thread that sleeps": (SLEEPING_THREAD, {None}),
    "many short sleeps": ("import time\nwhile True: time.sleep(0.001)", {None}),
    "recursion": (RECURSION, {1, -11, None}),
    "nested brackets": ("compile('(' * 10**6, '', 'exec')", {1, -11, None}),
    "memory": ("a = []\nwhile True: a.append(bytearray(1 << 20))", {1, None}),
    "a slow pattern": ("import re\nre.match('(a+)+b', 'a' * 60)", {None}),
    "a large number": ("2 ** 10 ** 10", {1, None}),
    "a main thread that ends": (LAST_THREAD, {None}),
    "an abort": ("import os; os.abort()", {-11, -6, -4, 127}),
}


@pytest.mark.parametrize("name", EXHAUSTING)
def test_attempts_to_exhaust_end_within_their_limits(name: str) -> None:
    attempt, exit_codes = EXHAUSTING[name]
    with NONE.start("import sys; exec(sys.stdin.read())", timeout_s=0.5) as opened:
        finished = opened.run(attempt, wall_s=2.0)
    assert finished.exit_code in exit_codes
    assert len(finished.output) <= 16 << 20
