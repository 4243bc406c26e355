"""Trackers in addition to metrics.jsonl, read back from the files that their libraries wrote."""

import json
import os
import pty
import re
import sqlite3
import subprocess
import sys
from configparser import ConfigParser
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_tracker import make_record, make_tracker
from source_tree import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_files import wandb_records

from april_rl.config.choices import TrackingBackend, WandbMode
from april_rl.config.schema import TrackingConfig
from april_rl.errors import RunError
from april_rl.metrics import Histogram, Metrics, Sum
from april_rl.run.tracking import backends, keys
from april_rl.run.tracking.labels import RunLabels, versions
from april_rl.run.tracking.metrics_file import read_metrics

WANDB, TRACKIO, TENSORBOARD = [[backend] for backend in TrackingBackend]
SETS = {"held_out": {"path": "held_out.jsonl"}, "aime24": None}  # null removes the set
LABELS = RunLabels(name="tiny seed=1", group="tiny", tags=("tiny", "seed=1"))
REWARDS = Histogram.of([0.0, 0.0, 1.0], num_bins=2)


def log_steps(tracker, steps=range(4)) -> None:
    """Log steps with three samples each, of which one is right, and forty tokens."""
    for step in steps:
        tracker.samples(step, [make_record(reward_parts=(("right", 1.0),))])
        tracker.log(
            step,
            Metrics(
                {
                    "reward/mean": step / 4,
                    "throughput/trained_tokens": Sum(40),
                    "histogram/reward": REWARDS,
                }
            ),
        )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("wandb")
    with make_tracker(run_dir, backends=WANDB, save_samples_every=2, labels=LABELS) as tracker:
        log_steps(tracker)
    return run_dir


@pytest.mark.slow
def test_a_secret_of_the_command_line_is_in_no_file_of_wandb(tmp_path, monkeypatch):
    """The shell has put it there. Fails when W&B records the words of this process as they are."""
    monkeypatch.setenv("TOOL_KEY", "sk-1234567890")
    words = ["train.py", "environment.args={api_key: sk-1234567890}"]
    monkeypatch.setattr(sys, "argv", words)
    with make_tracker(tmp_path, backends=WANDB, labels=LABELS) as tracker:
        log_steps(tracker)
    files = [path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert not any(b"sk-1234567890" in content for content in files)
    assert any(b"api_key: ${oc.env:TOOL_KEY}" in content for content in files)
    assert sys.argv == words


@pytest.fixture(scope="module")
def records(recorded) -> list[dict[str, Any]]:
    return wandb_records(recorded)


def test_wandb_holds_every_step_with_its_histogram(recorded, records):
    items = [record["history"]["item"] for record in records if "history" in record]
    rows = [item for item in items if "reward/mean" in item]
    assert [(row["step"], row["reward/mean"]) for row in rows] == [
        (step, step / 4) for step in range(4)
    ]
    assert rows[-1]["histogram/reward._type"] == "histogram"
    assert rows[-1]["histogram/reward.values"] == [2, 1]
    assert rows[-1]["histogram/reward.bins"] == [0, 0.5, 1]
    written = read_metrics(recorded / "metrics.jsonl")
    assert [
        {key: row[key] for key in of_step} for row, of_step in zip(rows, written, strict=True)
    ] == [pytest.approx(of_step) for of_step in written]
    assert not any("histogram" in key for row in written for key in row)


def test_wandb_has_step_trained_tokens_and_time_as_axes(recorded, records):
    found = [record["metric"] for record in records if "metric" in record]
    axes = {one.get("name") or one["glob_name"]: one.get("step_metric") for one in found}
    assert axes == {"step": None, keys.TRAINED_TOKENS: "step", keys.RUN_TIME: "step", "*": "step"}
    rows = read_metrics(recorded / "metrics.jsonl")
    assert [row[keys.TRAINED_TOKENS] for row in rows] == [40, 80, 120, 160]
    times = [row[keys.RUN_TIME] for row in rows]
    assert times == sorted(times)
    assert times[0] > 0


def test_wandb_has_name_group_tags_settings_and_versions(records):
    (run,) = [record["run"] for record in records if "run" in record]
    assert (run["display_name"], run["run_group"]) == (LABELS.name, LABELS.group)
    assert tuple(run["tags"]) == LABELS.tags
    config = run["config"]["update"]
    assert config["rollout"] == {"group_size": 8}
    assert config["versions"] == dict(versions())
    assert {"april_rl", "torch", "wandb"} <= config["versions"].keys()


def test_wandb_gets_a_table_of_samples_when_it_is_due(recorded):
    tables = sorted(recorded.glob("wandb/offline-run-*/files/media/table/samples_*.json"))
    found = [json.loads(path.read_text()) for path in tables]
    assert {table["data"][0][0] for table in found} == {0, 1, 2}
    row = dict(zip(found[0]["columns"], found[0]["data"][0], strict=True))
    row.pop("step")
    assert row == {
        "prompt_id": 7,
        "index": 2,
        "prompt": "12+7=",
        "response": "19 ✓",
        "ages": "3 of age 2, 2 of age 0",
        "num_tokens": 5,
        "reward": 1.0,
        "reward_parts": "right 1",
        "advantage": 0.87,
        "finish_reason": "stop",
        "source": "sums.jsonl:8",
    }


@pytest.mark.parametrize(("error", "code"), [(ValueError("no"), 1), (KeyboardInterrupt(), 255)])
def test_wandb_shows_how_a_run_ended(records, tmp_path, error, code):
    """W&B calls runs with these codes failed and killed, and runs with code 0 finished. Fails when
    the tracker ends the W&B run without the error that ended the run: code 0.
    """
    ending = pytest.raises(type(error))
    with ending, make_tracker(tmp_path, backends=WANDB) as tracker:
        tracker.log(1, Metrics({"reward/mean": 0.5}))
        raise error
    for found, expected in ((wandb_records(tmp_path), code), (records, 0)):
        (end,) = [record["exit"] for record in found if "exit" in record]
        assert end.get("exit_code", 0) == expected


def output_on_a_terminal(command: list[str], environment: dict[str, str]) -> str:
    """Return what the command prints when stdin, stdout and stderr are a terminal."""
    ours, theirs = pty.openpty()
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    ran = subprocess.run(command, env=environment, timeout=600, check=True, **ends)
    assert ran.returncode == 0
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        return terminal.read(65536).decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_an_online_run_without_a_key_asks_nothing_and_is_recorded_offline(tmp_path):
    """In a separate process, because W&B reads keys and addresses only once from the
    environment.
    """
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from april_rl.config.choices import WandbMode, TrackingBackend\n"
        "from april_rl.metrics import Metrics\n"
        "from small_tracker import make_tracker\n"
        "with make_tracker(Path(sys.argv[1]), backends=[TrackingBackend.wandb],"
        " wandb=WandbMode.online) as tracker:\n"
        "    tracker.log(1, Metrics({'reward/mean': 0.25}))\n"
    )
    environment = {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9", "PATH": ""}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    run_dir = tmp_path / "run"
    text = output_on_a_terminal([sys.executable, "-c", script, str(run_dir)], environment)
    assert text.count("W&B is not reachable (no API key") == 1
    assert "wandb sync" in text
    assert "0.25" in json.dumps(wandb_records(run_dir))


@pytest.mark.slow
def test_a_killed_offline_run_of_wandb_loses_at_most_its_last_second(tmp_path):
    """Fails when W&B writes only every fifteen seconds, which is its default."""
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from april_rl.config.choices import TrackingBackend\n"
        "from april_rl.metrics import Metrics\n"
        "from small_tracker import make_tracker\n"
        "tracker = make_tracker(Path(sys.argv[1]), backends=[TrackingBackend.wandb])\n"
        "tracker.log(1, Metrics({'reward/mean': 0.25}))\n"
        "time.sleep(2)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(command, env=environment, timeout=600, check=False)
    (record,) = [r["history"]["item"] for r in wandb_records(tmp_path) if "history" in r]
    assert record["step"] == 1


def test_a_disabled_run_leaves_no_wandb_files(tmp_path):
    with make_tracker(tmp_path, backends=WANDB, wandb=WandbMode.disabled) as tracker:
        log_steps(tracker, [1])
        assert tracker.wandb_id == ""
    assert not (tmp_path / "wandb").exists()


def test_trackio_holds_every_step_in_its_local_database(tmp_path, monkeypatch, capfd):
    """Also for a run that continues: it is one run with every step once."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # trackio reads it on import
    run_dir = tmp_path / "run"
    other = replace(LABELS, name="tiny lr=1")  # the labels of a resumed run with other settings
    for steps, first_step, labels in (((1, 2, 3), None, LABELS), ((3, 4), 3, other)):
        with make_tracker(
            run_dir,
            backends=TRACKIO,
            save_samples_every=4,
            labels=labels,
            config={"rollout": {"group_size": 8}, "evaluation": {"sets": SETS}},
            first_step=first_step,
        ) as tracker:
            log_steps(tracker, steps)
    with sqlite3.connect(tmp_path / "trackio" / "april_rl.db") as database:
        query = "select run_name, step, metrics from metrics order by id"
        rows = database.execute(query).fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    database.close()
    assert {name for name, _, _ in rows} == {"tiny seed=1 (run)"}
    logged = [(step, json.loads(metrics)) for _, step, metrics in rows]
    scalars = [(step, row["reward/mean"]) for step, row in logged if "reward/mean" in row]
    assert scalars == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert logged[1][1]["histogram/reward"]["values"] == [2, 1]
    _, table = [row["samples"]["_value"] for _, row in logged if "samples" in row]
    assert table[0]["response"] == "19 ✓"
    assert json.loads(config)["rollout"] == {"group_size": 8}
    out, err = capfd.readouterr()
    assert out.count("trackio show --project april_rl") == 2
    assert out.count("project=april_rl&metrics=reward/mean,eval/held_out/avg_at_k,rollout/") == 2
    assert "*" not in out + err, "trackio's own lines"


def test_tensorboard_holds_every_step_in_event_files(tmp_path):
    with make_tracker(tmp_path, backends=TENSORBOARD, save_samples_every=3) as tracker:
        log_steps(tracker)
    events = events_of(tmp_path)
    assert scalars_of(events) == [(step, step / 4) for step in range(4)]
    histogram = events.Histograms("histogram/reward")[-1].histogram_value
    assert (histogram.num, list(histogram.bucket)) == (3, [2, 1])
    (text,) = [e for e in events.Tensors("samples/text_summary") if e.step == 3]
    assert "19 ✓" in text.tensor_proto.string_val[0].decode()


def test_tensorboard_shows_each_step_with_the_numbers_of_the_resumed_branch(tmp_path):
    for steps, first_step, mean in ((range(5), None, 0.25), (range(3, 5), 3, 0.75)):
        with make_tracker(tmp_path, backends=TENSORBOARD, first_step=first_step) as tracker:
            for step in steps:
                tracker.log(step, Metrics({"reward/mean": mean}))
    expected = [(0, 0.25), (1, 0.25), (2, 0.25), (3, 0.75), (4, 0.75)]
    assert scalars_of(events_of(tmp_path)) == expected


def events_of(run_dir: Path) -> EventAccumulator:
    """Return everything in the event files of TensorBoard."""
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    return events


def scalars_of(events: EventAccumulator) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars("reward/mean")]


def test_a_tracker_that_fails_is_reported_once_and_wandb_prints_nothing(tmp_path, capfd):
    """A file is where TensorBoard would write; W&B and metrics.jsonl have every step. Fails when a
    tracker's own output is shown.
    """
    (tmp_path / "tensorboard").write_text("in the way")
    with make_tracker(tmp_path, backends=[*TENSORBOARD, *WANDB]) as tracker:
        log_steps(tracker)
    out, err = capfd.readouterr()
    title, run_directory, failed, *lines = out.splitlines()
    assert (title, run_directory) == ("trial: 4 steps of 16 groups", f"run directory: {tmp_path}")
    assert failed.startswith("tracking.backends: tensorboard failed (")
    assert [line.split()[0] for line in lines] == ["step", "age:", *"0123"]
    assert err == ""
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4
    history = [r for r in wandb_records(tmp_path) if "history" in r]
    assert len(history) == 4


class Failing:
    """A tracker whose server is gone after the first step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, step, values, histograms) -> None:  # noqa: ARG002
        self.steps.append(step)
        if step:
            raise ConnectionError("gone\nfor good")

    def finish(self, error=None) -> None:  # noqa: ARG002
        raise AssertionError("it was dropped")


def test_a_tracker_that_fails_later_gets_no_more_steps():
    told: list[str] = []
    failing, open_ones = Failing(), backends.Backends(told.append)
    open_ones.start("trackio", lambda: failing)
    for step in range(3):
        open_ones.log(step, {"reward/mean": 0.5}, {})
    open_ones.finish()
    assert failing.steps == [0, 1]
    assert "trackio failed (ConnectionError: gone) and stops recording" in "".join(told)


def test_a_tracker_that_is_not_installed_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda _: None)
    with pytest.raises(RunError, match=r"backends=\['trackio'\].*pip install trackio"):
        make_tracker(tmp_path, backends=TRACKIO)


def test_tracker_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match=r"wandb=online has no effect with .*backends=\[\]"):
        TrackingConfig(backends=[], wandb=WandbMode.online)
    with pytest.raises(ValueError, match="names a tracker twice"):
        TrackingConfig(backends=[*WANDB, *WANDB])


def test_a_plain_installation_has_the_tracker_that_runs_use_by_default():
    """Fails when a program from `pip install april_rl` refuses its own default settings."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = re.findall(r"^[\w-]+", setup["options"]["install_requires"], re.MULTILINE)
    assert {backend.value for backend in TrackingConfig().backends} <= set(required)
