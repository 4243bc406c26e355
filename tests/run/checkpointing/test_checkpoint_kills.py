"""A run is killed while it saves, prunes or goes back: the checkpoints that its next
start finds.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from small_checkpoints import write

from april_rl.run.checkpointing import folder as checkpoint_folder
from april_rl.run.checkpointing.folder import (
    latest,
    list_abandoned,
    prune,
    recover,
    set_aside_later,
)
from april_rl.run.checkpointing.manifest import verify


class Killed(BaseException):
    """A kill, which no handler in the code catches."""


def kill_at_call(monkeypatch, number: int) -> None:
    """Kill the process at the `number`-th call that changes the disk or makes it durable."""
    left = number

    def killed_at_the_nth(real):
        def call(*args: object, **settings: object) -> object:
            nonlocal left
            left -= 1
            if left <= 0:
                raise Killed
            return real(*args, **settings)

        return call

    for owner, name in (
        *((Path, name) for name in ("rename", "replace", "mkdir", "write_text")),
        (shutil, "rmtree"),
        (os, "fsync"),
        (checkpoint_folder, "write_manifest"),
    ):
        monkeypatch.setattr(owner, name, killed_at_the_nth(getattr(owner, name)))


def write_and_prune(root: Path, step: int, content: bytes) -> None:
    write(root, step, content=content)
    prune(root, keep_last=3, keep_best=0)


# What a run does with its checkpoints, and the content of the checkpoint from which it should
# resume afterwards: a stop saves step 30 again; the run goes back to step 20 and saves step 30 for
# the third time.
HISTORY = [
    (lambda root: write_and_prune(root, 10, b"10"), b"10"),
    (lambda root: write_and_prune(root, 20, b"20"), b"20"),
    (lambda root: write_and_prune(root, 30, b"30"), b"30"),
    (lambda root: write_and_prune(root, 30, b"stopped at 30"), b"stopped at 30"),
    (lambda root: write_and_prune(root, 35, b"35"), b"35"),
    (lambda root: set_aside_later(root / "step_20"), b"20"),
    (lambda root: write_and_prune(root, 30, b"another 30"), b"another 30"),
    (lambda root: write_and_prune(root, 40, b"40"), b"40"),
]


BACK = 5  # the operation that goes back


def test_a_kill_at_any_moment_loses_only_the_save_in_progress(tmp_path, monkeypatch):
    """The process is killed at each call of each operation, and in the operation that comes first
    afterwards. Fails when there is no complete checkpoint, when an announced one is lost, or when a
    branch returns that the run has left.
    """
    num_kills = 0
    for index, (operation, after) in enumerate(HISTORY):
        before = HISTORY[index - 1][1] if index else None
        is_back = index == BACK
        for number in range(1, 100):
            root = tmp_path / f"{index}_{number}"
            root.mkdir()
            for earlier, _ in HISTORY[:index]:
                earlier(root)
            with monkeypatch.context() as patched:
                kill_at_call(patched, number)
                try:
                    operation(root)
                except Killed:
                    num_kills += 1
                else:
                    break
            is_named = after in map(content_of, root.glob("step_*[0-9]"))
            found = content_of(load_folder(root))
            assert found in (before, after), (index, number)
            assert found == after or not is_named or is_back, (index, number)
            assert found == after or not is_back or not list_abandoned(root), (index, number)
            if found is not None:
                with monkeypatch.context() as patched:
                    kill_at_call(patched, number)
                    with suppress(Killed):
                        write_and_prune(root, 50, b"50")
                assert content_of(load_folder(root)) in (found, b"50"), (index, number)
    assert num_kills > 60, "every call was killed once"


def content_of(path: Path | None) -> bytes | None:
    return path and (path / "learner" / "rank_00000.safetensors").read_bytes()


def load_folder(root: Path) -> Path | None:
    """Return the checkpoint from which a run resumes after the kill; its files are unchanged. Set
    later ones aside, as a run does.
    """
    recover(root)
    path = latest(root)
    if path is not None:
        verify(path)
        set_aside_later(path)
    return path


def test_looking_for_the_latest_checkpoint_changes_nothing(tmp_path, monkeypatch):
    """Killed between the two renames of a second save. Fails when a command that only reads renames
    files of a run in progress, or does not find the checkpoint.
    """
    write(tmp_path, 20, content=b"first")
    rename = Path.rename

    def kill_rename(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise Killed
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", kill_rename)
        with pytest.raises(Killed):
            write(tmp_path, 20, content=b"second")
    before = sorted(tmp_path.iterdir())
    assert content_of(latest(tmp_path)) == b"second"
    assert sorted(tmp_path.iterdir()) == before
    assert load_folder(tmp_path) == tmp_path / "step_20"


def test_a_rename_that_the_disk_refuses_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    """The earlier checkpoint of the same step is hidden at that time. Fails when it
    stays hidden.
    """
    write(tmp_path, 20, content=b"first")
    rename = Path.rename

    def refuse_rename(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError("read-only")
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse_rename)
        with pytest.raises(OSError, match="read-only"):
            write(tmp_path, 20, content=b"second")
    shutil.rmtree(tmp_path / ".step_20.partial")
    assert content_of(load_folder(tmp_path)) == b"first"
