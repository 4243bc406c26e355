"""Forbids system calls in a sandboxed process: sockets, new processes, signals to others, and what
Landlock does not cover on older kernels.

Landlock only forbids TCP; without `socket` there is no network of any kind. A pair of stream
sockets, which event loops need, reaches only itself; one of datagram sockets reaches every socket
with a path. Standard library only, as it runs in the sandbox. Filter language:
docs.kernel.org/userspace-api/seccomp_filter.html.
"""

from __future__ import annotations

import ctypes
import errno
import platform

from april_rl.jail.landlock import PR_SET_NO_NEW_PRIVS, check_call, libc

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_GET_SECCOMP = 21
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000  # flags the calls in the second numbering of x86-64
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST, SECOND = 0, 4, 16, 24  # offsets in struct seccomp_data, low words
# This call and newer ones, which have equal numbers everywhere, fail as if missing.
FIRST_UNKNOWN = 441
CLONE_THREAD = 0x10000
PR_SET_PDEATHSIG = 1
ARCHITECTURES = ("x86_64", "aarch64")

# name: (number on x86-64, number on aarch64)
DENIED: dict[str, tuple[int, int]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "io_uring_setup": (425, 425),  # it has sockets of its own
    "setsockopt": (54, 208),  # it could enlarge the buffers of a socket pair
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "memfd_create": (319, 279),  # its memory counts towards no limit, like that of the next four
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),  # it reaches into other processes, like the next eight
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "flock": (73, 32),
    "sync": (162, 81),  # it makes other processes wait for the disk
    "syncfs": (306, 267),
    "inotify_init1": (294, 26),  # it watches files that Landlock hides, and a user has few watches
    "fanotify_init": (300, 262),
    "truncate": (76, 45),  # Landlock covers it from ABI 3
    "chmod": (90, 53),  # Landlock covers the content of files, but not their modes and owners
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, 54),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
# fork, vfork, lchown, utime, utimes, inotify_init, futimesat
ONLY_X86 = (57, 58, 94, 132, 235, 253, 261)
CLONE3 = 435
# Calls that depend on an argument: numbers, argument, comparison, values, and whether only these
# values are allowed, or only these are refused. A call must pass all of its lines.
BY_ARGUMENT: tuple[tuple[tuple[int, int], int, int, tuple[int, ...], bool], ...] = (
    ((56, 220), FIRST, JUMP_BITS, (CLONE_THREAD,), True),  # clone
    ((53, 199), FIRST, JUMP_EQUAL, (1,), True),  # socketpair: AF_UNIX
    # SOCK_STREAM, with SOCK_NONBLOCK and SOCK_CLOEXEC
    ((53, 199), SECOND, JUMP_EQUAL, (1, 0x801, 0x80001, 0x80801), True),
    ((302, 261), FIRST, JUMP_EQUAL, (0,), True),  # prlimit64: 0 stands for the process itself
    # Prctl: the child must not outlive its parent.
    ((157, 167), FIRST, JUMP_EQUAL, (PR_SET_PDEATHSIG,), False),
    # fcntl: F_SETOWN, F_SETSIG and F_SETOWN_EX send signals; F_SETLEASE, F_SETLK, F_SETLKW,
    # F_OFD_SETLK and F_OFD_SETLKW make other processes wait; F_SETPIPE_SZ uses up memory that the
    # user's processes share
    ((72, 25), SECOND, JUMP_EQUAL, (8, 10, 15, 1024, 6, 7, 37, 38, 1031), False),
    # ioctl: many requests send signals or change files, so only TCGETS, TIOCGWINSZ, FIONREAD,
    # FIONBIO, FIONCLEX and FIOCLEX are allowed
    ((16, 29), SECOND, JUMP_EQUAL, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451), True),
)


class Instruction(ctypes.Structure):
    """One instruction of the filter."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("constant", ctypes.c_uint32),
    )


class FilterProgram(ctypes.Structure):
    """The filter as the kernel takes it."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction)))


def is_supported() -> bool:
    """Return whether this machine can filter system calls and their numbers are known here."""
    return platform.machine() in ARCHITECTURES and libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def deny_escapes() -> None:
    """Make the calls in DENIED and new processes fail with EPERM for good; raise OSError."""
    code = [Instruction(*line) for line in _instructions(platform.machine())]
    program = FilterProgram(len(code), (Instruction * len(code))(*code))
    check_call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    check_call(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))


def _instructions(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter as (code, jump if true, jump if false, constant); jumps are relative."""
    column = ARCHITECTURES.index(machine)
    refused = (RETURN, 0, 0, FAIL | errno.EPERM)
    lines = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_AT_LEAST, 0, 1, X32_BIT),
        refused,
    ]
    numbers = [numbers[column] for numbers in DENIED.values()]
    for number in [*numbers, *(ONLY_X86 if column == 0 else ())]:
        lines += [(JUMP_EQUAL, 0, 1, number), refused]
    # The C library first tries clone3, whose flags a filter cannot see, and then clone.
    missing = (RETURN, 0, 0, FAIL | errno.ENOSYS)
    lines += [(JUMP_EQUAL, 0, 1, CLONE3), missing, (JUMP_AT_LEAST, 0, 1, FIRST_UNKNOWN), missing]
    for of_call, argument, comparison, values, are_allowed in BY_ARGUMENT:
        judged = [(LOAD, 0, 0, argument)]
        if are_allowed:
            past = len(values)
            judged += [(comparison, past - i, 0, value) for i, value in enumerate(values)]
            judged.append(refused)
        else:
            for value in values:
                judged += [(comparison, 0, 1, value), refused]
        lines += [(LOAD, 0, 0, NUMBER), (JUMP_EQUAL, 0, len(judged), of_call[column]), *judged]
    return [*lines, (RETURN, 0, 0, ALLOW)]
