"""Checkpoints of a few bytes, for tests of their folder."""

from pathlib import Path

from april_rl.run.checkpointing.folder import begin, commit
from april_rl.run.checkpointing.manifest import record


def write(root: Path, step: int, *, content: bytes = b"weights" * 100, **about: object) -> Path:
    """Write a checkpoint with one file that has a worker's hash and one without a hash."""
    partial = begin(root, step)
    (partial / "learner").mkdir()
    shard = partial / "learner" / "rank_00000.safetensors"
    shard.write_bytes(content)
    (partial / "config.yaml").write_text("name: test\n")
    records = {"learner/rank_00000.safetensors": record(shard)}
    return commit(partial, step=step, about=about, records=records, required=records)
