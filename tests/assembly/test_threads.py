"""A worker's threads: its part of the machine's cores."""

from pathlib import Path

import pytest
from composed_config import load

from april_rl.assembly import workers
from april_rl.planning.layout import Layout
from april_rl.planning.sizes import EngineSizes


@pytest.mark.parametrize(
    ("device", "num_workers", "overrides", "expected"),
    [
        ("cpu", 4, (), 16),
        ("cuda", 4, (), 16),
        ("cuda", 8, (), 8),
        ("cuda", 16, (), 8),  # on two machines
        ("cuda", 1, (), 16),  # the run takes at most 16 of the 64 cores
        ("cuda", 8, ("runtime.threads=3",), 3),
    ],
)
def test_a_worker_gets_its_part_of_the_cores_on_a_gpu_too(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: str,
    num_workers: int,
    overrides: tuple[str, ...],
    expected: int,
) -> None:
    """On a machine with 64 cores and 8 GPUs. Fails when a worker copies with the single thread that
    Ray sets.
    """
    given: dict[str, workers.WorkerSettings] = {}
    monkeypatch.setattr(workers, "Workers", lambda _, **settings: given.update(settings))
    monkeypatch.setattr(workers, "num_gpus", lambda: 8)
    monkeypatch.setattr(workers, "stop_token_ids", lambda *_, **__: [])
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 64)
    layout = Layout(device=device, num_workers=num_workers, tensor_parallel_size=1)
    config = load("+recipe=tiny_cpu", *overrides)
    workers.build_workers(config, layout, run_dir=tmp_path, sizes=EngineSizes(1, 1))
    assert given["settings"].threads == expected
