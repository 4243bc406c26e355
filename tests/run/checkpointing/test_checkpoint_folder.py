"""A checkpoint appears completely or not at all, and a damaged one is refused with the
file's name.
"""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoints import write

from april_rl.run.checkpointing import folder as checkpoint_folder
from april_rl.run.checkpointing.folder import (
    begin,
    commit,
    latest,
    list_abandoned,
    list_saved,
    prune,
    set_aside_later,
)
from april_rl.run.checkpointing.manifest import CheckpointError, read_manifest, record, verify
from april_rl.run.checkpointing.resume import checkpoint_at, load, unfinished_run


@pytest.mark.parametrize("failing", ["write_manifest", "sync", "_point_to"])
def test_an_interrupted_save_keeps_the_earlier_checkpoint(tmp_path, monkeypatch, failing):
    """Fails when a checkpoint gets its name before it is complete, or the next save fails on the
    remains.
    """
    before = write(tmp_path, 1)

    def kill(*_: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_folder, failing, kill)
        with pytest.raises(OSError, match="killed"):
            write(tmp_path, 2)
    assert latest(tmp_path) == before
    for one in list_saved(tmp_path):
        verify(one.path)
    assert write(tmp_path, 3) == latest(tmp_path)
    assert not list(tmp_path.glob(".step_*"))


def test_the_checkpoint_that_latest_names_is_never_pruned(tmp_path):
    """Fails when a person who went back to an earlier step loses the checkpoints that the run then
    writes.
    """
    for step in (20, 90, 100, 30):
        write(tmp_path, step, **({"score": 0.9} if step == 20 else {}))
    prune(tmp_path, keep_last=2, keep_best=1)
    assert latest(tmp_path) == tmp_path / "step_30"
    assert [one.step for one in list_saved(tmp_path)] == [20, 30, 90, 100]


def test_later_checkpoints_of_an_abandoned_branch_are_set_aside(tmp_path):
    """Fails when `auto` resumes from them, pruning counts them, or they are deleted without a
    request.
    """
    for step in (20, 90, 100):
        write(tmp_path, step)
    left = names(set_aside_later(tmp_path / "step_20"))
    assert left == ["step_90.abandoned", "step_100.abandoned"]
    assert latest(tmp_path) == tmp_path / "step_20"
    verify(tmp_path / "step_100.abandoned")
    write(tmp_path, 100)
    assert names(set_aside_later(tmp_path / "step_20")) == ["step_100.abandoned.2"]
    write(tmp_path, 30)
    assert prune(tmp_path, keep_last=2, keep_best=0) == []
    assert set_aside_later(tmp_path / "step_30") == []
    left = names(list_abandoned(tmp_path))
    assert sorted(left) == ["step_100.abandoned", "step_100.abandoned.2", "step_90.abandoned"]
    removed = prune(tmp_path, keep_last=2, keep_best=0, keep_abandoned=1)
    assert names(removed) == left[:2]


def test_a_run_does_not_resume_from_an_abandoned_branch_in_its_folder(tmp_path):
    """Fails when two branches share a folder: `auto` would not find the second one."""
    root = tmp_path / "run" / "checkpoints"
    for step in (20, 30):
        write(root, step)
    [left] = set_aside_later(root / "step_20")
    with pytest.raises(
        CheckpointError, match=r"belongs to a branch that .*run has left: resume it in"
    ):
        load(str(left), tmp_path / "run")
    # The file is valid, but it does not contain the state of a run.
    with pytest.raises(CheckpointError, match=r"run\.json"):
        load(str(left), tmp_path / "another run")


def test_without_latest_the_newest_complete_checkpoint_is_found(tmp_path):
    good, bad = write(tmp_path, 10), write(tmp_path, 20)
    (tmp_path / "latest").unlink()
    (bad / "manifest.json").unlink()
    assert latest(tmp_path) == good


def test_a_latest_file_that_names_another_folder_is_not_followed(tmp_path):
    """Fails when the pointer is used as a path without a check."""
    good = write(tmp_path / "run", 1)
    write(tmp_path / "other", 7)
    (tmp_path / "run" / "latest").write_text("../other/step_7")
    assert latest(tmp_path / "run") == good


def test_old_checkpoints_are_removed_and_the_best_are_kept(tmp_path):
    for step, score in ((1, 0.5), (2, 0.25), (3, None), (10, 0.75), (20, None)):
        write(tmp_path, step, **({} if score is None else {"score": score}))
    assert names(prune(tmp_path, keep_last=2, keep_best=2)) == ["step_2", "step_3"]
    assert [one.step for one in list_saved(tmp_path)] == [1, 10, 20]
    assert names(prune(tmp_path, keep_last=1, keep_best=1)) == ["step_1"]


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_a_file_that_the_controller_cannot_see_fails_the_checkpoint(tmp_path):
    partial = begin(tmp_path, 1)
    with pytest.raises(CheckpointError, match="shared file system"):
        commit(
            partial,
            step=1,
            about={},
            records={"learner/rank_00001.safetensors": record(Path(__file__))},
            required=(),
        )
    assert latest(tmp_path) is None


@given(st.data())
def test_a_flipped_bit_or_a_truncated_file_is_found_everywhere(tmp_path_factory, data):
    """Fails when a file is not hashed, or only its size is compared."""
    path = write(tmp_path_factory.mktemp("root"), 1)
    names = [p for p in path.rglob("*") if p.is_file() and p.name != "manifest.json"]
    victim = data.draw(st.sampled_from(sorted(names)))
    content = bytearray(victim.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    victim.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(victim)):
        verify(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[]", "has format"),
        ('{"format": 99}', "has format 99, and this version of april_rl reads format 2"),
        ('{"format": 2}', "cannot be read"),
        (
            '{"format": 2, "files": {"../../etc/passwd": {"bytes": 1, "xxh3": ""}}}',
            "leads|not a path",
        ),
        ('{"format": 2, "files": {"a": 3}}', "cannot be read"),
    ],
)
def test_a_manifest_of_another_program_or_format_is_refused(tmp_path, text, message):
    """Fails when a library's error reaches the user, or a path may lead out of the folder."""
    path = write(tmp_path, 1)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(path)


def test_a_damaged_checkpoint_is_refused_and_the_newest_good_one_is_suggested(tmp_path):
    root = tmp_path / "checkpoints"
    good, _, bad = write(root, 1), write(root, 2), write(root, 3)
    for path in (root / "step_2", bad):
        shard = path / "learner" / "rank_00000.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"it is incomplete\n.*: resume={good}"):
        load("auto", tmp_path)


def test_a_path_that_is_not_a_checkpoint_is_refused(tmp_path):
    """Fails when a mistyped path starts a new run."""
    write(tmp_path / "run" / "checkpoints", 4)
    (tmp_path / "empty" / "checkpoints" / "step_9").mkdir(parents=True)
    for path, said in (
        (tmp_path / "nowhere", r"nowhere/checkpoints has no checkpoint"),
        (tmp_path / "run" / "checkpoints" / "step_5", r"run/checkpoints has step_4"),
        (tmp_path / "empty" / "checkpoints" / "step_9", r"has no manifest\.json"),
    ):
        with pytest.raises(CheckpointError, match=said):
            load(str(path), tmp_path / "new")
    assert load("auto", tmp_path) is None


def test_resume_accepts_a_run_directory_its_checkpoints_or_one_of_them(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    first, last = write(root, 4), write(root, 10)
    assert checkpoint_at(first) == first
    assert checkpoint_at(root) == checkpoint_at(tmp_path / "run") == last


def test_the_newest_unfinished_run_is_found(tmp_path):
    for number, name in enumerate(["old", "new", "done"]):
        path = write(tmp_path / name / "checkpoints", 1, is_finished=name == "done")
        os.utime(path, (number, number))
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    assert unfinished_run(tmp_path) == tmp_path / "new"
    assert unfinished_run(tmp_path / "nowhere") is None


def test_the_manifest_is_plain_json(tmp_path):
    found = json.loads((write(tmp_path, 1) / "manifest.json").read_text())
    assert found["files"]["config.yaml"]["bytes"] == len("name: test\n")
