"""`python -m april_rl push`: what the hub receives, and what is refused before it receives
anything.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from hub_server import TOKEN, Hub, serve
from huggingface_hub import ModelCard, constants
from omegaconf import OmegaConf
from printed_error import printed_error
from small_checkpoints import write

from april_rl.__main__ import main
from april_rl.config import TrainConfig
from april_rl.config.task import EvaluationSetConfig
from april_rl.run.tracking.metrics_file import MetricsFile

Push = Callable[..., CompletedProcess[str]]
GIVEN = ["+recipe=qwen3_4b_dapo", "optimizer.lr=2e-6", "data.answer_pattern=(a|b)"]


def make_export(run: Path, *, step: int = 20, model: str = "Qwen/Qwen3-4B") -> Path:
    """Write a run with an export of `step`, evaluated before the first step and at step 20."""
    config = TrainConfig()
    config.name, config.model.path, config.data.path = "math", model, "openai/gsm8k:main"
    config.evaluation.num_samples = 4
    config.evaluation.sets["aime"] = EvaluationSetConfig(path="aime.jsonl")
    run.mkdir()
    OmegaConf.save(OmegaConf.structured(config), run / "config.yaml")
    with closing(MetricsFile(run / "metrics.jsonl")) as file:
        for row, accuracy in ((0, 0.25), (10, 0.3), (20, 0.5)):
            around = {"": 0.0, "_low": -0.1, "_high": 0.1}
            figures = {f"eval/aime/avg_at_k{end}": accuracy + off for end, off in around.items()}
            passes = {f"eval/aime/pass_at_k{end}": 0.7 + off for end, off in around.items()}
            file.append(row, {"reward/mean": 0.5} if row == 10 else {**figures, **passes})
    write(run / "checkpoints", step, name="math", overrides=GIVEN)
    export = run / "exports" / f"step_{step}"
    (export / "adapter").mkdir(parents=True)
    (export / "config.json").write_text("{}")
    (export / "adapter" / "adapter_config.json").write_text('{"r": 8}')
    (export / "model.safetensors").write_bytes(b"\x00weights" * 100)
    return export


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve(Hub()) as found:
        yield found


@pytest.fixture
def push(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Push:
    """Return a function that runs the command in this process, as a user with `token`, on a hub."""

    def run(hub: Hub, *words: str, token: str | None = TOKEN) -> CompletedProcess[str]:
        for name, value in {
            **{"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True},
            "HF_TOKEN_PATH": "/nowhere/of/the/hub",
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", token or "")
        return CompletedProcess(words, main(["push", *words]), *capsys.readouterr())

    return run


def test_the_hub_receives_every_file_and_a_card_in_one_commit(
    push: Push, hub: Hub, tmp_path: Path
) -> None:
    """Fails when a file is left out, weights arrive damaged, or the card does not tell a stranger
    how good the policy is and how it was trained.
    """
    export = make_export(tmp_path / "run")
    done = push(hub, str(export), "lab/math-4b", "--private", "--revision", "step20")
    assert done.returncode == 0, done.stderr
    assert f"pushed: {hub.url}/lab/math-4b/commit/" in done.stdout
    assert hub.repositories == {"lab/math-4b": True}
    assert hub.branches == {"step20"}
    assert [(branch, header["summary"]) for branch, header in hub.commits] == [
        ("step20", "Push step_20 with april_rl")
    ]
    written = {path.relative_to(export).as_posix() for path in export.rglob("*.*")}
    assert hub.files.keys() == written | {"README.md"}
    assert {name: hub.files[name] for name in written} == {
        name: (export / name).read_bytes() for name in written
    }
    card = ModelCard(hub.files["README.md"].decode())
    assert card.data.base_model == "Qwen/Qwen3-4B"
    assert card.data.datasets == ["openai/gsm8k"]
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_name, result.metric_value) == ("aime", "avg@4", 0.5)
    row = "| aime | 4 | 0.250 [0.150, 0.350] | 0.500 [0.400, 0.600] | 0.700 [0.600, 0.800] |"
    assert row in card.text
    command = "train +recipe=qwen3_4b_dapo optimizer.lr=2e-6 'data.answer_pattern=(a|b)'\n"
    assert f"python -m april_rl.{command}" in card.text
    assert (tmp_path / "run" / "config.yaml").read_text().rstrip() in card.text
    assert "| april_rl | " in card.text
    assert "| loss, advantage | `ppo_clip`, `grpo` |" in card.text


def test_only_files_that_an_export_writes_are_published(
    push: Push, hub: Hub, tmp_path: Path
) -> None:
    """Not notes, hidden files in folders, targets of links, or secrets in the records."""
    export = make_export(tmp_path / "run")
    (export / "adapter" / ".netrc").write_text("password")
    (export / "notes.txt").write_text("mine")
    (export / "vocab.json").symlink_to("/etc/hostname")
    (export / "notes").symlink_to("/etc")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("name: math", f"name: {TOKEN}"))
    done = push(hub, str(export), "lab/math")
    assert done.returncode == 0, done.stderr
    assert hub.files.keys() == {
        *("README.md", "config.json", "model.safetensors", "adapter/adapter_config.json")
    }
    assert [line for line in done.stderr.splitlines() if line.startswith("note: ")] == [
        f"note: {name} is left out: it is a link, or not part of an export"
        for name in ("adapter/.netrc", "notes.txt", "vocab.json")
    ]
    told = "README.md, adapter/adapter_config.json, config.json, model.safetensors"
    assert f"publishing for everyone, unless the repository is private: {told}" in done.stdout
    assert TOKEN not in hub.files["README.md"].decode()
    assert "name: ${oc.env:HF_TOKEN}" in hub.files["README.md"].decode()


@pytest.mark.parametrize(
    ("rewards", "metric", "heading"),
    [
        ((0, 1.0, 1, None), "accuracy", "Held-out accuracy"),
        ((0.0, 0.25, 1.0), "mean_reward", "Held-out mean reward"),
        ((-1.0, 1.0), "mean_reward", "Held-out mean reward"),
        ((), "mean_reward", "Held-out mean reward"),  # no samples were saved
    ],
)
def test_a_mean_of_partial_credits_is_not_called_an_accuracy(
    push: Push, hub: Hub, tmp_path: Path, rewards: tuple, metric: str, heading: str
) -> None:
    export = make_export(tmp_path / "run")
    (tmp_path / "run" / "samples").mkdir()
    text = "".join(json.dumps({"reward": reward}) + "\n" for reward in rewards)
    (tmp_path / "run" / "samples" / "eval_aime_step_20.jsonl").write_text(text)
    printed = push(hub, str(export), "lab/math-4b", "--dry-run", token=None).stdout
    assert f"type: {metric}\n" in printed
    assert f"## {heading}\n" in printed
    assert ("accuracy" in printed.lower()) == (metric == "accuracy")


def test_a_dry_run_prints_the_card_and_the_files_without_a_token(
    push: Push, hub: Hub, tmp_path: Path
) -> None:
    export = make_export(tmp_path / "run", step=10, model=str(tmp_path))
    done = push(hub, str(export), "lab/math-4b", "--dry-run", token=None)
    assert done.returncode == 0, done.stderr
    assert "Not measured at step 10." in done.stdout
    assert "base_model" not in done.stdout  # a local folder does not exist on the hub
    assert done.stdout.splitlines()[-1].split() == ["800", "model.safetensors"]
    assert hub.asked == []


def test_a_users_own_card_is_uploaded_unchanged(push: Push, hub: Hub, tmp_path: Path) -> None:
    export = make_export(tmp_path / "run")
    (export / "README.md").write_text("---\nlicense: mit\n---\nmine\n")
    done = push(hub, str(export), "someone/math")
    assert done.returncode == 0, done.stderr
    assert hub.files["README.md"] == b"---\nlicense: mit\n---\nmine\n"
    assert hub.repositories == {"someone/math": False}


def test_an_export_without_its_run_gets_a_short_card_and_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = make_export(tmp_path / "run").rename(tmp_path / "policy")
    assert main(["push", str(moved), "lab/math", "--dry-run"]) == 0
    shown = capsys.readouterr()
    said = f"note: {moved} is not in a run directory, so its card lacks accuracy and settings\n"
    assert shown.err == said
    assert "# math" in shown.out
    assert "Settings" not in shown.out


@pytest.mark.parametrize(
    ("folder", "name", "message"),
    [
        (
            "nowhere",
            "lab/math",
            "there is no folder {}/nowhere: give an export, RUN/exports/step_N",
        ),
        ("run", "lab/math", "{}/run is a run directory: give an export, such as {}/run/exports/s"),
        (
            "run/checkpoints",
            "lab/math",
            "is not an exported policy: it has no config.json. A run w",
        ),
        ("run/exports/step_20", "math", "math has no owner: give OWNER/NAME"),
        ("run/exports/step_20", "lab/a b", "lab/a b is not a valid repository name: "),
        ("half", "lab/math", "{}/half is not an exported policy: it has no model-2.safetensors."),
    ],
)
def test_a_folder_that_is_not_an_export_and_a_bad_name_are_refused(
    folder: str, name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_export(tmp_path / "run")
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text("{}")
    index = {"weight_map": {"a": "config.json", "b": "model-2.safetensors"}}
    (half / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["push", str(tmp_path / folder), name]) == 1
    assert message.replace("{}", str(tmp_path)) in printed_error(capsys)


@pytest.mark.parametrize(
    ("token", "role", "name", "message"),
    [
        (None, "write", "lab/math", "there is no token for the hub: run `hf auth login`, or set"),
        ("hf_wrong", "write", "lab/math", "the hub does not know this token: run `hf auth"),
        (TOKEN, "read", "lab/math", "the token laptop can only read: create one with write"),
        (TOKEN, "write", "other/math", "the token cannot write to other/math: use another owner"),
        (TOKEN, "write", "lab/open", "lab/open exists and is public: make it private in"),
    ],
)
def test_a_refusal_of_the_hub_is_reported_before_the_upload(
    token: str | None, role: str, name: str, message: str, push: Push, hub: Hub, tmp_path: Path
) -> None:
    hub.role, hub.repositories["lab/open"] = role, False
    export = make_export(tmp_path / "run")
    done = push(hub, str(export), name, "--private", token=token)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {message}")
    assert (hub.commits, hub.large, hub.repositories) == ([], {}, {"lab/open": False})


def test_an_unreachable_hub_gives_one_message(push: Push, tmp_path: Path) -> None:
    export = make_export(tmp_path / "run")
    # A port where nothing listens.
    done = push(Hub(url="http://127.0.0.1:9"), str(export), "lab/math")
    assert done.returncode == 1
    assert done.stderr.startswith("error: http://127.0.0.1:9 cannot be reached: ")
    assert done.stderr.count("\n") == 1
