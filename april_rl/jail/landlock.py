"""Landlock through system calls: a process gives up the file system and signals to others for good.

Standard library only, as it runs in the sandbox. Constants and structures:
docs.kernel.org/userspace-api/landlock.html.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

# System call numbers, the same on every architecture.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
READ_FILE, READ_DIR = 1 << 2, 1 << 3
# ABI version: the accesses that it can forbid.
FILES = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
SCOPE_ABI, ABSTRACT_SOCKETS_AND_SIGNALS = 6, 3
PR_SET_NO_NEW_PRIVS = 38

libc = ctypes.CDLL(None, use_errno=True)


class RulesetAttributes(ctypes.Structure):
    """Access that a rule set restricts: everything that no rule allows again is forbidden."""

    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),  # zero: the seccomp filter denies all sockets
        ("scoped", ctypes.c_uint64),
    )


class PathAttributes(ctypes.Structure):
    """Access that is allowed below a path."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi_version() -> int:
    """Return the kernel's Landlock ABI; 0 without Landlock."""
    version: int = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION_FLAG)
    return max(0, version)


def allow_reading_only(paths: Iterable[str]) -> None:
    """Restrict this process and its children to reading what lies under `paths`.

    Forbidden: every other file and folder, writing, executing, and from ABI 6 on signals to other
    processes. Not covered: open files, sockets, `stat` and `chdir`, the list of processes, memory
    and CPU time. Paths that do not exist are skipped. Raise OSError when the kernel refuses.
    """
    abi = abi_version()
    attributes = RulesetAttributes(
        files=sum(rights for since, rights in FILES.items() if abi >= since),
        scoped=ABSTRACT_SOCKETS_AND_SIGNALS if abi >= SCOPE_ABI else 0,
    )
    # an older kernel accepts fields that it does not know if they are zero
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    ruleset = check_call(libc.syscall(CREATE_RULESET, ctypes.byref(attributes), size, 0))
    for path in paths:
        if os.path.exists(path):
            _allow_reading(ruleset, path)
    check_call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    check_call(libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def check_call(returned: int) -> int:
    """Return what a system call returned; raise OSError when it failed."""
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return returned


def _allow_reading(ruleset: int, path: str) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    allowed = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
    rule = PathAttributes(allowed=allowed, parent=parent)
    check_call(libc.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.byref(rule), 0))
    os.close(parent)
