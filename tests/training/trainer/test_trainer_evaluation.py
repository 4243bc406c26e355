"""Evaluations within a run do not change training, and they write their samples."""

import json
from dataclasses import replace
from pathlib import Path

from fake_outside import reward
from test_trainer import HELD_OUT, rows_of, run, settings

from april_rl.config.schema import TrackingConfig
from april_rl.types import SampleId


def test_training_is_the_same_with_and_without_evaluation(tmp_path: Path) -> None:
    """Samples are parked at every step. Fails when an evaluation uses a prompt, a slot or a seed of
    training, or ends parked samples.
    """
    config = settings(num_steps=4, every=1)
    requests, losses = [], []
    for folder, held_out in (("with", HELD_OUT), ("without", None)):
        engine = run(config, tmp_path / folder, held_out=held_out).engine
        requests.append([r for r in engine.requests if r.sample_id.prompt_id >= 0])
        rows = rows_of(tmp_path / folder)
        losses.append([row["reward/mean"] for row in rows if "reward/mean" in row])
        assert sum(row.get("rollout/resumed_samples", 0) for row in rows) > 0
        assert (len(engine.requests) > len(requests[-1])) is (held_out is not None)
    assert requests[0] == requests[1]
    assert losses[0] == losses[1]


def test_the_samples_of_every_evaluation_are_saved(tmp_path: Path) -> None:
    """Unless samples are turned off. Fails when only the samples of the last step are kept."""
    config = settings(num_steps=2, every=1)
    run(config, tmp_path / "saved")
    for step in range(3):
        path = tmp_path / "saved" / "samples" / f"eval_held_out_step_{step}.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert [record["prompt_id"] for record in records] == [0, 1, 2]
        for place, record in enumerate(records):
            assert record["reward"] == reward(SampleId(-1 - place, 0))
            assert record["num_tokens"] == len(record["response"].split())
    never = replace(config, tracking=TrackingConfig(save_samples_every=None))
    run(never, tmp_path / "never")
    assert not list((tmp_path / "never").glob("samples/eval_*"))
