"""Joining a Ray cluster that was started by others and is protected by a token."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from own_process import is_running, wait_until

from april_rl.config.runtime import RuntimeConfig
from april_rl.training.runtime.cluster import JoinError, join

RAY = Path(sys.executable).with_name("ray")
JOIN = """
import ray, sys
from april_rl.errors import RunError
from april_rl.training.runtime.cluster import Placement, start_ray, stop_ray
try:
    start_ray(num_workers=1, address=sys.argv[1])
except RunError as error:
    sys.exit(str(error))
placement = Placement(num_workers=1, tensor_parallel_size=1, use_gpu=False)
[strategy] = placement.strategies()
print("free", ray.available_resources().get("CPU", 0.0))
if len(sys.argv) == 2:
    placement.remove()
stop_ray()
"""

START = """
import psutil, sys
from april_rl.errors import RunError
from april_rl.training.runtime.cluster import start_ray
try:
    start_ray(num_workers=1, address=None)
except RunError as error:
    print(*(child.pid for child in psutil.Process().children()))
    sys.exit(str(error))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """One node with one CPU, and the file with its token."""

    address: str
    token: Path
    process: subprocess.Popen[bytes]


def environment(token: Path | None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    kept |= {"HOME": "/nonexistent", "RAY_AUTH_MODE": "token"}
    return kept if token is None else {**kept, "RAY_AUTH_TOKEN_PATH": str(token)}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """Start a cluster with `ray start --block`, in a folder with a short name (sockets)."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        token = Path(folder, "token")
        token.write_text("0123456789abcdef" * 4)
        port, log = free_port(), Path(folder, "log")
        args = f"start --head --block --node-ip-address=127.0.0.1 --port={port} --num-cpus=1"
        # Another cluster may use the default port.
        args += f" --ray-client-server-port={free_port()}"
        args += " --include-dashboard=false --object-store-memory=80000000 --disable-usage-stats"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [RAY, *args.split(), f"--temp-dir={folder}"],
                env=environment(token),
                stdout=output,
                stderr=output,
            )
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield RunningCluster(address=f"127.0.0.1:{port}", token=token, process=process)
        process.terminate()
        try:
            process.wait(timeout=20)
        finally:  # the reaper of the cluster ends what it started
            process.kill()
            process.wait()


def connect(cluster: RunningCluster, token: Path | None, *args: str) -> tuple[str, list[str], int]:
    """Return what a controller with `token` prints, its lines on stderr, and its exit status."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", JOIN, cluster.address, *args],
        env=environment(token),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stdout.strip(), done.stderr.splitlines(), done.returncode


@pytest.mark.slow
def test_a_run_joins_a_cluster_with_a_token_and_leaves_it_as_it_was(cluster):
    """One run uses the only CPU and ends without releasing it; the next run finds it free.

    Fails when the reservation outlives its run.
    """
    assert connect(cluster, cluster.token, "keep") == ("free 0.0", [], 0)
    assert connect(cluster, cluster.token) == ("free 0.0", [], 0)
    assert cluster.process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("text", ["another" * 9, None])
def test_a_wrong_or_missing_token_is_named_at_once(cluster, tmp_path, text):
    """Fails when Ray tries twenty times and then only says that it failed to connect."""
    token = None
    if text is not None:
        token = tmp_path / "token"
        token.write_text(text)
    _, lines, status = connect(cluster, token)
    said = lines[-1]
    assert len(lines) <= 2, lines  # our line, and Ray's line for its one attempt
    assert said.startswith(f"runtime.ray_address={cluster.address}: the cluster requires its token")
    assert "RAY_AUTH_TOKEN_PATH" in said
    assert status == 1


def test_an_address_where_nothing_listens_is_named_at_once():
    """Fails when this is left to Ray, which takes many minutes."""
    port = free_port()
    with pytest.raises(JoinError, match=rf"runtime\.ray_address=127\.0\.0\.1:{port}: no Ray"):
        join(f"127.0.0.1:{port}")


def fail_to_start(**variables: str) -> subprocess.CompletedProcess[str]:
    """Return what a start of Ray with these variables prints before it ends with an error."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1
    return done


@pytest.mark.slow
def test_a_start_of_ray_that_takes_too_long_ends_in_one_message_and_leaves_no_process():
    """Ray gives its head process no time to start. Fails when Ray's error ends in a traceback."""
    done = fail_to_start(RAY_gcs_server_port_wait_time_s="0")
    [said] = done.stderr.splitlines()
    assert said.startswith("Ray did not start on this machine (Timed out waiting for file")
    assert "RAY_gcs_server_port_wait_time_s=300" in said
    started = [int(pid) for pid in done.stdout.split()]
    assert started
    wait_until(lambda: not any(map(is_running, started)))


@pytest.mark.parametrize(
    ("variable", "advice"),
    [("TMPDIR", "TMPDIR={folder} is too long"), ("HOME", "set HOME={folder} to a folder")],
)
def test_a_folder_that_ray_cannot_use_is_named_by_its_variable(tmp_path, variable, advice):
    folder = tmp_path / ("long" * 12 if variable == "TMPDIR" else "home")
    folder.mkdir()
    (folder / ".ray").write_text("in the way")
    done = fail_to_start(**{variable: str(folder)})
    assert advice.format(folder=folder) in done.stderr
    assert "busy" not in done.stderr


@pytest.mark.parametrize("address", ["node1:6379", "10.0.0.1:6379", "[fd00::1]:6379", "auto", None])
def test_an_address_may_be_host_and_port_or_auto(address):
    assert RuntimeConfig(ray_address=address).ray_address == address


@pytest.mark.parametrize("address", ["node1", "local", "ray://node1:10001", "node1:6379/x", ""])
def test_any_other_address_is_refused(address):
    """Ray would start a new cluster at `local`, and use another protocol at `ray://`."""
    with pytest.raises(ValueError, match=r"runtime\.ray_address must be host:port, auto or null"):
        RuntimeConfig(ray_address=address)
