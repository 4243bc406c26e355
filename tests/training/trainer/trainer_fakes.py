"""Workers, a tokenizer and signals for tests of the trainer, without processes or a model."""

import json
from contextlib import nullcontext
from pathlib import Path

from fake_engine import FakeEngine, FakeEngines

from april_rl.metrics import Metrics
from april_rl.run.checkpointing.checkpointer import Written


class FakeWorkers:
    """Workers that learn nothing; they record the state of the disk at each export."""

    has_failed = False

    def __init__(self, engines: FakeEngines, run_dir: Path) -> None:
        self._engines, self._run_dir = engines, run_dir
        # The report's name and the last row of metrics.jsonl.
        self.exports: list[tuple[str, dict[str, float]]] = []

    @property
    def engine(self) -> FakeEngine:
        return self._engines.each[0]

    def update(self, batch) -> Metrics:
        assert batch.metrics.read()["throughput/trained_tokens"] > 0
        return Metrics()

    def sync_weights(self, policy_version: int) -> Metrics:
        self._engines.set_version(policy_version)
        return Metrics()

    def start_saving(self, folder: Path) -> list[str]:
        folder.mkdir()
        (folder / "rank_00000.safetensors").write_bytes(b"weights")
        return ["rank_00000.safetensors"]

    def poll_save(self) -> Written:
        return Written(records={})

    def load_state(self, folder: Path) -> None:
        assert (folder / "rank_00000.safetensors").read_bytes() == b"weights"

    def export(self, path: Path) -> None:
        self.exports.append((path.name, rows_of(self._run_dir)[-1]))
        path.mkdir(parents=True, exist_ok=True)


class FakeTokenizer:
    """A tokenizer whose text is the token ids."""

    def decode(self, token_ids) -> str:
        return " ".join(map(str, token_ids))


class NoInterrupts:
    """Interrupts that never come."""

    def check(self) -> None:
        """Do nothing, because there is no signal."""

    arm = disarm = check
    reason, is_person = "", False

    def hold(self, *, deadline_s: float) -> nullcontext[None]:  # noqa: ARG002
        """Return a context without effect: there is no signal to hold."""
        return nullcontext()


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
