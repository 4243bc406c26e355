"""Unfinished and untrained samples are written in full, no matter how the run ended."""

import errno
import json
from pathlib import Path

from rollout_runs import Run, Setup, lognormal


def test_every_token_that_was_generated_and_not_trained_is_written():
    """Fails when ready groups, parked groups, or the groups of a failed update are left out."""
    run = Run(Setup(alpha=3.0, length_of=lognormal(8, 0.9), tick_steps=9))
    under_way = run.step().groups
    while not 0 < run.buffer.num_ready < run.buffer.num_live:
        under_way = run.step().groups
    leftovers = run.collector.leftovers(under_way=under_way)
    lines = [json.loads(line) for line in leftovers.lines()]
    assert {line["state"] for line in lines} == {"collected", "ready", "parked"}
    trained = [s for scored in run.trained[: -len(under_way)] for s in scored.group.samples]
    tokens = sum(len(c["token_ids"]) for line in lines for c in line["spans"])
    assert tokens == run.fakes.generated - sum(sample.num_tokens for sample in trained)
    assert all(len(c["logprobs"]) == len(c["token_ids"]) for line in lines for c in line["spans"])
    num_parked = len({line["prompt_id"] for line in lines if line["state"] == "parked"})
    parked = f"{num_parked} parked ({leftovers.parked_tokens} response tokens)"
    assert f"groups: {parked}, 1 ready (" in str(leftovers)


def test_a_full_disk_is_reported_and_hides_no_other_error(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = Run(Setup(alpha=3.0, length_of=lognormal(8, 0.9)))
    under_way = run.step().groups
    monkeypatch.setattr(Path, "open", full)
    said = run.collector.leftovers(under_way=under_way).keep(tmp_path / "leftover.jsonl")
    assert said.startswith("generated and not trained, and could not be saved ([Errno 28] No space")
