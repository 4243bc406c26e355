"""A run writes metrics, samples and its configuration into a directory that belongs to it alone."""

import json
import math
import re
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import yaml
from byte_tokenizer import END, hf_byte_tokenizer
from light_samples import PROMPT, completion
from small_tracker import make_record, make_tracker

from april_rl.errors import RunError
from april_rl.metrics import Max, Mean, Metrics, Sum
from april_rl.run.tracking import keys
from april_rl.run.tracking.metrics_file import MetricsFile, read_metrics
from april_rl.run.tracking.samples_file import records_of, write_samples
from april_rl.run.tracking.tracker import RunDirectoryError
from april_rl.task.data.tokenizer import Tokenizer
from april_rl.types import Group, Sample, ScoredGroup

# The list from the design, written by hand: dashboards and scripts break when a key changes.
FROZEN = """
rollout: time_s generated_tokens_per_s finished_samples_per_s in_flight_mean occupancy
rollout: resumed_samples parked_groups parked_tokens ready_groups reprefill_tokens
rollout: rejected_groups truncated_frac response_tokens_mean response_tokens_p50
rollout: response_tokens_p95 response_tokens_p99 response_tokens_max over_sampling_factor
rollout: stop_s
staleness: age_mean age_max off_policy_token_frac token_frac_age_*
reward: mean std no_signal_frac errors
loss: total clip_frac behaviour_kl entropy grad_norm ratio_mean ratio_max is_weight_mean
loss: age_weight_mean
mismatch: logprob_abs_mean logprob_abs_max
ledger: opened in_flight parked ready trained rejected dropped
time: rollout_s score_s update_s weight_sync_s checkpoint_s step_s
throughput: trained_tokens_per_s
sync: bytes
eval: */avg_at_k */pass_at_k */response_tokens_mean
"""


def frozen_list() -> list[str]:
    lines = [line.split(": ") for line in FROZEN.strip().splitlines()]
    return [f"{stage}/{quantity}" for stage, rest in lines for quantity in rest.split()]


def test_the_frozen_keys_match_the_design() -> None:
    assert list(keys.FROZEN_KEYS) == frozen_list()


@pytest.mark.parametrize(
    "key", ["reward", "/mean", "reward/", "Reward/mean", "reward mean/x", "step"]
)
def test_a_key_without_stage_and_quantity_is_refused_by_name(tmp_path: Path, key: str) -> None:
    with (
        closing(MetricsFile(tmp_path / "m.jsonl")) as file,
        pytest.raises(ValueError, match=re.escape(repr(key))),
    ):
        file.append(1, {key: 1.0})
    assert list(tmp_path.iterdir()) == [], "a file without a step"


def test_metrics_that_come_late_are_added_to_the_row_of_their_step(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "m.jsonl")) as file:
        file.append(1, {"reward/mean": 0.5})
        file.append(2, {"reward/mean": 0.25, "loss/total": math.nan})
        file.amend(2, {"eval/test/avg_at_k": 1.0})
        with pytest.raises(ValueError, match="reward/mean of step 2 is logged already"):
            file.amend(2, {"reward/mean": 1.0})
        file.append(3, {"reward/mean": 0.0})
        file.amend(4, {"eval/test/avg_at_k": 0.5})
    assert read_metrics(tmp_path / "m.jsonl") == [
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.25, "loss/total": None, "eval/test/avg_at_k": 1.0},
        {"step": 3, "reward/mean": 0.0},
        {"step": 4, "eval/test/avg_at_k": 0.5},
    ]


def test_a_step_is_one_line_sorted_by_stage_and_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    values = {
        "custom/a": 1.0,
        "time/step_s": 2.0,
        "eval/held_out/avg_at_k": 0.5,
        "rollout/time_s": 3.0,
    }
    with closing(MetricsFile(path)) as file:
        file.append(3, values | {"loss/total": math.nan, "loss/ratio_max": math.inf})
        text = path.read_text()
    assert text.count("\n") == 1
    assert json.loads(text) == {
        "step": 3,
        "rollout/time_s": 3.0,
        "loss/ratio_max": None,
        "loss/total": None,
        "time/step_s": 2.0,
        "eval/held_out/avg_at_k": 0.5,
        "custom/a": 1.0,
    }
    order = ["step", "rollout/time_s", "loss/ratio_max", "loss/total", "time/step_s"]
    assert list(json.loads(text)) == [*order, "eval/held_out/avg_at_k", "custom/a"]


def test_a_step_is_written_once_and_in_order(tmp_path: Path) -> None:
    with closing(MetricsFile(tmp_path / "m.jsonl")) as file:
        file.append(2, {"reward/mean": 0.1})
        for step in (2, 1):
            with pytest.raises(
                ValueError, match=f"metrics of step {step} come after the metrics of step 2"
            ):
                file.append(step, {"reward/mean": 0.1})


@pytest.mark.parametrize("line", ["{not json", "[1]", '{"reward/mean": 1}'])
def test_a_broken_metrics_file_is_reported_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}:2")):
        read_metrics(path)


def test_a_sample_is_written_in_full_with_the_ages_of_its_completions(tmp_path: Path) -> None:
    path = write_samples(
        tmp_path / "samples",
        10,
        [make_record(reward_parts=(("right", 1.0), ("length", -0.5))), make_record(reward=0.0)],
    )
    assert path == tmp_path / "samples" / "step_00010.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "prompt_id": 7,
        "index": 2,
        "prompt": "12+7=",
        "response": "19 ✓",
        "answer": "19",
        "reward": 1.0,
        "advantage": 0.87,
        "finish_reason": "stop",
        "num_tokens": 5,
        "ages": [[2, 3], [0, 2]],
        "source": "sums.jsonl:8",
        "reward_parts": {"right": 1.0, "length": -0.5},
        "ends": [],
        "conversation": [],
    }
    assert second["reward"] == 0.0


def test_the_ends_of_completions_match_the_response_before_them() -> None:
    """Completions end within characters, and each token is decoded only a few times, however many
    completions there are.
    """
    tokenizer = Tokenizer(hf_byte_tokenizer(), path="byte")
    token_ids = tokenizer.encode([f"é ✓🙂 a  b{END}" * 60], add_special_tokens=False)[0]
    lengths = [1 + place % 3 for place in range(len(token_ids))]
    spans = [
        replace(
            completion(0, start=start, num_tokens=1, version=0), token_ids=piece, logprobs=piece
        )
        for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False)
        if (piece := token_ids[start : start + length])
    ]
    spans[-1] = replace(spans[-1], finish_reason="stop")
    group = Group(prompt=PROMPT, samples=(Sample(PROMPT, 0, tuple(spans)),))
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return tokenizer.decode(ids)

    (record,) = records_of(
        [ScoredGroup(group=group, rewards=(1.0,))], [[0.0]], decode=decode, policy_version=1
    )
    assert sum(decoded) < 25 * len(token_ids)
    ends = accumulate(len(span.token_ids) for span in spans)
    assert record.ends == tuple(len(tokenizer.decode(token_ids[:end])) for end in ends)


def test_a_run_writes_its_config_its_metrics_and_its_samples(tmp_path: Path) -> None:
    run_dir = tmp_path / "outputs" / "trial"
    with make_tracker(run_dir, save_samples_every=2) as tracker:
        assert [tracker.wants_samples(step) for step in (1, 2, 3, 4)] == [True, True, False, True]
        for step in (1, 2):
            tracker.log(step, Metrics({"reward/mean": Mean(3.0, 4.0), "reward/errors": Sum(2)}))
            tracker.samples(step, [make_record()])
        tracker.log(3, Metrics({"loss/ratio_max": Max(1.5)}))
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config == {"name": "trial", "rollout": {"group_size": 8}}
    rows = read_metrics(run_dir / "metrics.jsonl")
    clocked = {"time/run_s", "time/tracking_s"}
    assert [
        {key: value for key, value in row.items() if key not in clocked and value} for row in rows
    ] == [
        {"step": 1, "reward/mean": 0.75, "reward/errors": 2},
        {"step": 2, "reward/mean": 0.75, "reward/errors": 2},
        {"step": 3, "loss/ratio_max": 1.5},
    ]
    assert all(clocked <= row.keys() for row in rows)
    assert [path.name for path in sorted((run_dir / "samples").iterdir())] == [
        "step_00001.jsonl",
        "step_00002.jsonl",
    ]
    assert not (run_dir / "wandb").exists()


def test_three_consecutive_steps_without_a_signal_are_reported_once_below_the_third(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when a run that learns nothing reports it only at its end, or after every step."""
    shares = [1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    with make_tracker(tmp_path, num_steps=10) as tracker:
        tracker.log(0, Metrics({"eval/held_out/avg_at_k": 0.0}))
        for step, share in enumerate(shares, start=1):
            tracker.log(step, Metrics({"reward/mean": 0.0, "reward/no_signal_frac": share}))
    lines = capsys.readouterr().out.splitlines()
    (told,) = [n for n, line in enumerate(lines) if line.startswith("No group has a signal")]
    assert lines[told - 1].split()[0] == "5"
    assert lines[told] == (
        "No group has a signal since step 3: all rewards of a group are equal, so nothing is "
        "learned. Use easier or harder prompts, or another reward."
    )


def test_samples_of_the_first_and_last_step_are_saved_unless_turned_off(tmp_path: Path) -> None:
    """Fails when a run with fewer steps than tracking.save_samples_every shows no samples."""
    for every, saved in ((10, [1, 4]), (None, [])):
        with make_tracker(tmp_path / str(every), save_samples_every=every) as tracker:
            for step in (1, 2, 3, 4):
                assert tracker.wants_samples(step) == (step in saved)
                tracker.samples(step, [make_record()])
        names = sorted(path.name for path in (tmp_path / str(every)).glob("samples/*"))
        assert names == [f"step_{step:05d}.jsonl" for step in saved]


def test_a_run_directory_that_cannot_be_created_gives_an_error_that_names_the_setting(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"file/run cannot be written .*hydra\.run\.dir"):
        make_tracker(tmp_path / "file" / "run")


def test_samples_that_cannot_be_written_are_reported_with_their_folder(tmp_path: Path) -> None:
    with make_tracker(tmp_path, save_samples_every=1) as tracker:
        (tmp_path / "samples").write_text("in the way")
        with pytest.raises(RunDirectoryError, match=r"written \(File exists: .*samples\)$"):
            tracker.samples(1, [make_record()])


def test_a_directory_with_a_run_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    """Fails when metrics.jsonl is opened for appending, or config.yaml is written
    before the check.
    """
    with make_tracker(tmp_path) as tracker:
        tracker.log(0, Metrics({"reward/mean": 0.5}))
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    message = rf"hydra\.run\.dir={re.escape(str(tmp_path))} already holds a run"
    with pytest.raises(RunDirectoryError, match=message):
        make_tracker(tmp_path, config={"name": "another"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_directory_whose_run_was_refused_at_the_start_can_be_used_again(tmp_path: Path) -> None:
    """Fails when a metrics.jsonl without a step remains."""
    with pytest.raises(RunError), make_tracker(tmp_path):
        raise RunError("no such data")
    with make_tracker(tmp_path) as tracker:
        tracker.log(0, Metrics({"reward/mean": 0.5}))
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0]
