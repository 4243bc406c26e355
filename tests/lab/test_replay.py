"""`python -m april_rl replay`: a recorded step trained again is equal to the run's."""

import json
import re
import shutil
from itertools import chain
from pathlib import Path
from statistics import fmean

import pytest
import torch
from command_line import groups_of, run_here, steps_of, write_task
from transformers import AutoModelForCausalLM, AutoTokenizer

from april_rl.__main__ import main
from april_rl.training.recorded_steps import read_recorded

RECORDED = (
    *("trainer.record_steps=all", "checkpoint.every_steps=1", "checkpoint.keep_last=9"),
    *("optimizer.schedule=linear", "trainer.num_minibatches=2"),
)
# What the losses of the field need beside them, and models beside the policy.
KINDS: dict[str, tuple[str, ...]] = {
    "grpo": ("algorithm=grpo",),
    "dapo": ("algorithm=dapo",),
    "gspo": ("algorithm=gspo",),
    "cispo": ("algorithm=cispo",),
    "lora": ("lora.rank=4",),
    "ppo": ("algorithm=ppo", "critic.lr=1e-3"),
    "reference": ("algorithm.kl=k3", "algorithm.reference_every=2", "algorithm.kl_coefficient=0.1"),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("replayed"))


def recorded(task: Path, name: str, *settings: str) -> Path:
    """Return a run of four steps whose steps are recorded."""
    run_here(task, task / name, *RECORDED, *settings)
    return task / name


@pytest.fixture(scope="module")
def run_dir(task: Path) -> Path:
    return recorded(task, "plain")


@pytest.mark.slow
@pytest.mark.cpu_engine
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("dapo", "ppo") else pytest.mark.soak)
        for kind in KINDS
    ],
)
def test_a_step_trained_again_is_equal_to_the_bit(task: Path, capsys, kind: str) -> None:
    """From the checkpoint before it, and from an earlier one over a step in between. Fails when the
    optimizer's state, the schedule, ages, probes, the critic or the moving reference are lost.
    """
    folder = recorded(task, kind, *KINDS[kind])
    for step in (4, 3):
        assert main(["replay", str(folder), "--step", str(step)]) == 0
        shown = capsys.readouterr().out
        assert f"step {step} again is equal to the run to the bit" in shown, shown
        assert len(re.findall(r"^(?:loss|staleness|mismatch|critic)/\S+", shown, re.MULTILINE)) > 9
        for saved in (folder / "checkpoints").glob("step_3*"):
            saved.rename(saved.with_name(".hidden"))  # so that step 3 is trained again, too
            break


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_other_settings_stand_beside_it(run_dir: Path, capsys, tmp_path: Path) -> None:
    """A third of the learning rate is a shorter step in the same direction."""
    file = tmp_path / "replay.json"
    step_of = ["replay", str(run_dir), "--step", "2", "--json", str(file)]
    lr = 1e-3
    assert main([*step_of, f"optimizer.lr={lr / 3}"]) == 0
    assert "update, cosine with the run" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["changed"]["loss/lr"] == pytest.approx(found["again"]["loss/lr"] / 3)
    assert found["changed"]["update_norm"] == pytest.approx(
        found["again"]["update_norm"] / 3, rel=0.1
    )
    assert found["changed"]["cosine"] > 0.99
    assert main([*step_of, "algorithm.advantage=rloo"]) == 0
    other = json.loads(file.read_text())
    assert other["again"] == found["again"]
    assert other["changed"]["cosine"] < found["changed"]["cosine"]


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_held_out_responses_become_more_or_less_likely(run_dir: Path, capsys, tmp_path) -> None:
    """After the last step as transformers has it for the exported policy; without a learning rate
    nothing changes. Fails when an evaluation after the step is taken, or other tokens.
    """
    file = tmp_path / "replay.json"
    step_of = ["replay", str(run_dir), "--step", "4", "--json", str(file)]
    assert main([*step_of, "optimizer.lr=1e-30"]) == 0
    assert re.search(r"^held_out, right: nats a token .* -?\d", capsys.readouterr().out, re.M)
    found = json.loads(file.read_text())
    policy = AutoModelForCausalLM.from_pretrained(run_dir / "exports" / "step_4")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "exports" / "step_4")
    logprobs: dict[str, list[float]] = {"held_out, right": [], "held_out, wrong": []}
    for line in (run_dir / "samples" / "eval_held_out_step_2.jsonl").read_text().splitlines():
        record = json.loads(line)
        prompt, response = (
            tokenizer(record[key], add_special_tokens=key == "prompt")["input_ids"]
            for key in ("prompt", "response")
        )
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])
        logprobs[f"held_out, {'right' if record['reward'] else 'wrong'}"] += own[:, 0].tolist()
    for name, (before, after) in found["again"]["held_out"].items():
        assert before != after
        assert after == pytest.approx(fmean(logprobs[name]), abs=1e-4)
        unchanged = found["changed"]["held_out"][name]
        assert unchanged == pytest.approx([before, before], abs=1e-6)


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_every_response_has_its_share_of_the_update(run_dir: Path, capsys, tmp_path: Path) -> None:
    """A response pulls as its advantage says: up with a positive one, down with a negative, and not
    at all with none. Fails when rows are taken for those of other responses.
    """
    file = tmp_path / "replay.json"
    step_of = ["replay", str(run_dir), "--step", "3", "--json", str(file)]
    assert main([*step_of, "algorithm.opsm_threshold=1e-6"]) == 0
    assert "responses that pull most at the update" in capsys.readouterr().out
    found = json.loads(file.read_text())
    samples = {(s["prompt_id"], s["index"]): s for s in chain(*groups_of(run_dir))}
    for update in (found["again"], found["changed"]):
        responses = update["responses"]
        assert len(responses) == 16
        assert sum(each["share"] for each in responses) == pytest.approx(1)
        assert [each["share"] for each in responses] == sorted(
            (each["share"] for each in responses), reverse=True
        )
    assert any(each["masks"] for each in found["changed"]["responses"])
    assert not any(each["masks"] for each in found["again"]["responses"])
    for each in found["again"]["responses"]:
        assert (each["share"] > 0) == (abs(each["advantages"]) > 0)
        recorded = samples.get((each["prompt_id"], each["index"]))
        if recorded is not None:
            assert each["num_tokens"] == recorded["num_tokens"]
            assert each["advantages"] == pytest.approx(recorded["advantage"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_another_reward_scores_the_responses_again(run_dir: Path, capsys, tmp_path: Path) -> None:
    """The other reward is the opposite, and so is every advantage of this step."""
    file = tmp_path / "replay.json"
    other = "reward.function=reward_functions:odd_length"
    assert main(["replay", str(run_dir), "--step", "3", other, "--json", str(file)]) == 0
    assert re.search(r"^reward/mean ", capsys.readouterr().out, re.MULTILINE)
    found = json.loads(file.read_text())
    assert found["again"]["reward/mean"] == found["run"]["reward/mean"]
    assert found["changed"]["reward/mean"] == pytest.approx(1 - found["run"]["reward/mean"])
    # Adam remembers the steps before, which both have.
    assert found["changed"]["cosine"] < 0.95


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_only_the_newest_steps_are_kept_and_the_model_of_the_package_is_found_again(
    task: Path, capsys
) -> None:
    builtin = ("model.path=builtin:tiny", "trainer.record_steps=2", "trainer.num_steps=3")
    folder = recorded(task, "newest", *builtin)
    kept = sorted(path.stem for path in (folder / "recorded").glob("*.json"))
    assert kept == ["step_00002", "step_00003"]
    assert main(["replay", str(folder), "--step", "3"]) == 0
    assert "is equal to the run to the bit" in capsys.readouterr().out
    assert main(["replay", str(folder), "--step", "1"]) == 1
    assert "is not recorded, steps 2 to 3 is: train with trainer.record_steps" in (
        capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_what_was_recorded_is_what_was_trained(run_dir: Path) -> None:
    for row in steps_of(run_dir):
        groups = read_recorded(run_dir, int(row["step"])).groups
        tokens = sum(s.num_tokens for scored in groups for s in scored.group.samples)
        assert tokens == row["throughput/trained_tokens"]
        rewards = [reward for scored in groups for reward in scored.rewards]
        assert sum(rewards) / len(rewards) == pytest.approx(row["reward/mean"])


def test_a_folder_that_is_no_run_is_refused(capsys, tmp_path: Path) -> None:
    assert main(["replay", str(tmp_path), "--step", "1"]) == 1
    assert "is not the directory of a run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_step_before_the_first_checkpoint_begins_with_the_model(run_dir: Path, capsys) -> None:
    assert main(["replay", str(run_dir), "--step", "1"]) == 0
    assert "step 1 again is equal to the run to the bit" in capsys.readouterr().out
    first = run_dir / "recorded" / "step_00001.json"
    hidden = first.rename(first.with_suffix(".hidden"))
    assert main(["replay", str(run_dir), "--step", "1"]) == 1
    hidden.rename(first)
    assert "step 1 of" in capsys.readouterr().err
    assert main(["replay", str(run_dir), "--step", "2", "algorithm.los=gspo"]) == 1
    assert "algorithm.los" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_steps_in_a_row_go_on_with_the_weights_of_the_other_settings(
    run_dir: Path, capsys, tmp_path: Path
) -> None:
    """With the run's settings each is equal to the run; with another rate the second step begins
    with other weights. The page has every response, shaded by token.
    """
    file, page = tmp_path / "replay.json", tmp_path / "replay.html"
    asked = ["replay", str(run_dir), "--steps", "2-4", "optimizer.lr=1e-5"]
    assert main([*asked, "--json", str(file), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "step 4 again is equal to the run to the bit" in shown
    assert re.search(r"^step 3 +run +again +optimizer.lr=1e-5$", shown, re.MULTILINE)
    found = json.loads(file.read_text())
    rows = {row["step"]: row for row in steps_of(run_dir)}
    distances = []
    for step in (2, 3):
        course = found["course"][str(step)]
        assert course["again"]["loss/entropy"] == rows[step]["loss/entropy"]
        distances.append(abs(course["changed"]["loss/entropy"] - rows[step]["loss/entropy"]))
    assert 0 < 2 * distances[0] < distances[1], "the second step starts from other weights"
    text = page.read_text()
    assert text.count("<details data-share=") == 2 * 16
    assert (
        len(re.findall(r'<span class="(?:up|down)" style="--pull:[1-90.]+" title="push', text)) > 99
    )
    with pytest.raises(SystemExit):
        main(["replay", str(run_dir), "--steps", "4-2"])
    assert "two as in 400-412" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_another_loss_is_that_of_a_run_which_had_it_at_that_step(task: Path, tmp_path) -> None:
    """To the bit: equal samples are drawn by the run that is resumed with it."""
    run_dir, file = recorded(task, "bits", "deterministic=true"), tmp_path / "replay.json"
    other = task / "other"
    shutil.copytree(run_dir, other)
    gspo = [f"algorithm.{each}" for each in ("loss=gspo", "clip_low=3e-4", "clip_high=4e-4")]
    resumed = f"resume={other / 'checkpoints' / 'step_3'}"
    run_here(task, other, *RECORDED, "deterministic=true", resumed, *gspo)
    assert main(["replay", str(run_dir), "--step", "4", *gspo, "--json", str(file)]) == 0
    found, row = json.loads(file.read_text())["changed"], steps_of(other)[-1]
    for key in ("loss/total", "loss/grad_norm", "loss/ratio_max", "loss/clip_frac"):
        assert found[key] == row[key]
