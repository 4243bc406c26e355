"""A run owns its directory; a second one is refused, and a dead owner fools nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from april_rl.checkpointing.resume import unfinished_run
from april_rl.checkpointing.run_lock import FILE, STALE_S, RunOwnedError, owned, owner_of

OWNER = """
import sys, time
from pathlib import Path
from april_rl.checkpointing.run_lock import owned
with owned(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path):
    """Another process that owns tmp_path."""
    args = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "owned\n"
        yield process
        process.kill()


def test_a_second_owner_is_refused_with_the_name_of_the_first(owner, tmp_path):
    """Fails when two runs write into one directory, or the message does not say who is there."""
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    said = rf"process {owner.pid} on .*hydra\.run\.dir"
    with pytest.raises(RunOwnedError, match=said), owned(tmp_path):
        pytest.fail("two owners")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert f"process {owner.pid} on " in owner_of(tmp_path)


def test_an_owner_that_was_killed_leaves_the_directory_free(owner, tmp_path):
    """Its file stays. Fails when the file alone counts."""
    owner.kill()
    owner.wait()
    assert (tmp_path / FILE).is_file()
    assert owner_of(tmp_path) is None
    with owned(tmp_path):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_on_another_host_is_believed_while_it_renews_its_file(tmp_path):
    """Where file systems do not share locks. Fails when it is never, or for ever."""
    path = tmp_path / FILE
    path.write_text(json.dumps({"host": "elsewhere", "pid": os.getpid(), "since": "noon"}))
    with pytest.raises(RunOwnedError, match="on elsewhere, since noon"), owned(tmp_path):
        pytest.fail("two owners")
    old = time.time() - STALE_S - 1
    os.utime(path, (old, old))
    with owned(tmp_path):
        pass


def test_a_run_that_is_going_on_is_found_before_its_first_checkpoint(owner, tmp_path):
    """And its directory is then refused. Fails when `resume=auto` starts another run beside it."""
    assert owner.poll() is None
    found = unfinished_run(tmp_path.parent)
    assert found is not None
    assert found.resolve() == tmp_path.resolve()  # pytest has links to its folders


def test_what_is_asked_about_a_directory_changes_nothing(tmp_path):
    """Fails when a look leaves a file behind."""
    assert owner_of(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    assert owner_of(Path(tmp_path, "missing")) is None
