"""A run whose teacher is on vLLM's own server, through the command."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from command_line import command, refusal, rows_of, run

from april_rl.task.tiny.builtins import resolve

SMALL = (
    "+recipe=tiny_distill_cpu",
    *("trainer.num_steps=3", "trainer.num_groups=16", "rollout.temperature=1"),
    *("deterministic=true", "evaluation.sets.held_out=null", "runtime.ray=false"),
)
NAME = "tiny_teacher"
START_S = 300


@contextmanager
def vllm_server(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--model", resolve(f"builtin:{NAME}")]
    words += ["--served-model-name", NAME, "--max-model-len", "512", "--dtype", "float32"]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(words, env=env, stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, folder / "server.log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        try:
            with urlopen(address):
                return
        except (URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_teacher_on_a_server_trains_like_one_in_the_worker(tmp_path: Path) -> None:
    """vLLM and the learner compute one model, so the runs differ only by rounding. Fails when the
    server's values reach the wrong tokens.
    """
    with vllm_server(tmp_path) as address:
        server = ("teacher.path=null", f"teacher.base_url={address}", f"teacher.model={NAME}")
        for name, words in (("beside", ()), ("server", server)):
            done = run(command(None, tmp_path / name, *SMALL, *words), tmp_path)
            assert done.returncode == 0, done.stderr[-3000:]
        assert f"teacher: {NAME} at {address}" in done.stdout
    steps = [
        [row for row in rows_of(tmp_path / name) if "loss/total" in row]
        for name in ("beside", "server")
    ]
    assert len(steps[0]) == 3
    for beside, remote in zip(*steps, strict=True):
        for key in ("loss/teacher_kl", "loss/grad_norm", "loss/total"):
            assert remote[key] == pytest.approx(beside[key], rel=1e-3), key
        assert remote["time/teacher_s"] > 0


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_named_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("april_rl.start.assembly.run.build_workers")
    monkeypatch.setattr("april_rl.task.teacher_server._MAX_RETRIES", 0)
    words = ("teacher.path=null", "teacher.base_url=http://127.0.0.1:9/v1", "teacher.model=x")
    message = refusal(None, tmp_path, *SMALL, *words)
    assert message.startswith("teacher.base_url=http://127.0.0.1:9/v1, model x failed: ")
