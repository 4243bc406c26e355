"""Forbids system calls in a sandboxed process: sockets, new processes, signals to others.

Landlock only forbids TCP; without `socket` there is no network of any kind. Standard library only,
as it runs in the sandbox. Filter language: docs.kernel.org/userspace-api/seccomp_filter.html.
"""

from __future__ import annotations

import ctypes
import errno
import platform

from april_rl.rewards.builtin.landlock import PR_SET_NO_NEW_PRIVS, checked, libc

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_GET_SECCOMP = 21
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000  # calls in the second numbering of x86-64
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, low words
CLONE_THREAD = 0x10000
ARCHITECTURES = ("x86_64", "aarch64")

# name: number on x86-64, on aarch64
DENIED: dict[str, tuple[int, int]] = {
    "socket": (41, 198),
    "io_uring_setup": (425, 425),  # has sockets of its own
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
    "mount": (165, 40),
    "umount2": (166, 39),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "memfd_create": (319, 279),  # memory that counts towards no limit, like the next four
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "truncate": (76, 45),  # Landlock covers it from ABI 3 on
    "chmod": (90, 53),  # Landlock covers the content of files, not their modes and owners
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, 54),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
}
ONLY_X86 = (57, 58, 94, 132, 235, 261)  # fork, vfork, lchown, utime, utimes, futimesat
CLONE, CLONE3, PRLIMIT = (56, 220), (435, 435), (302, 261)


class Instruction(ctypes.Structure):
    """One instruction of the filter."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("constant", ctypes.c_uint32),
    )


class Program(ctypes.Structure):
    """The filter as the kernel takes it."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction)))


def is_supported() -> bool:
    """Return whether this machine can filter system calls and their numbers are known here."""
    return platform.machine() in ARCHITECTURES and libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def deny_escapes() -> None:
    """Make the calls in DENIED and new processes fail with EPERM for good; threads are allowed.

    Raise OSError when the kernel refuses the filter.
    """
    code = [Instruction(*line) for line in _instructions(platform.machine())]
    program = Program(len(code), (Instruction * len(code))(*code))
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))


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
    # the C library tries clone3 first, whose flags a filter cannot see, and then clone
    lines += [(JUMP_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    allowed = (RETURN, 0, 0, ALLOW)
    return [
        *lines,
        *(
            (JUMP_EQUAL, 0, 4, CLONE[column]),
            (LOAD, 0, 0, FIRST_ARGUMENT),
            (JUMP_BITS, 0, 1, CLONE_THREAD),
            allowed,
            refused,
        ),
        *(  # a process may set its own limits (0 is itself), not another's
            (JUMP_EQUAL, 0, 4, PRLIMIT[column]),
            (LOAD, 0, 0, FIRST_ARGUMENT),
            (JUMP_EQUAL, 0, 1, 0),
            allowed,
            refused,
        ),
        allowed,
    ]
