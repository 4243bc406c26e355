"""`learner.router_replay` through the command; test_model_limits.py has the models it refuses."""

import sys
from typing import Any

import pytest
from command_line import command, run, steps_of
from safetensors.numpy import load_file
from source_tree import TESTS
from tiny_models import write_tiny_qwen3_moe

SETTINGS = ("learner.router_replay=learner", "trainer.num_minibatches=2")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_mixture_of_experts_trains_with_repeated_choices(task, tmp_path):
    """The step is so large that experts change. Fails when the setting does not reach the learner:
    the first step is the same, and the next ones differ.
    """
    write_tiny_qwen3_moe(tmp_path / "model", initializer_range=0.05)
    common = (
        *(f"model.path={tmp_path / 'model'}", "trainer.num_steps=2", "optimizer.lr=1e-2"),
        *("rollout.max_response_tokens=24", "evaluation.every=100", "deterministic=true"),
    )
    largest = {}
    for name, settings in (("repeated", SETTINGS), ("chosen", SETTINGS[1:])):
        ended = run(command(task, tmp_path / name, *common, *settings), tmp_path)
        assert ended.returncode == 0, ended.stderr
        rows = steps_of(tmp_path / name)
        assert len(rows) == 2
        largest[name] = [row["loss/grad_norm"] for row in rows]
    assert largest["repeated"] != largest["chosen"]


# The run uses vLLM's model runner for GPUs, the only one that reports experts.
INTERPRETED = """
import runpy
from interpreted_runner import use_runner_of_gpus

if __name__ == "__main__":
    use_runner_of_gpus()
    runpy.run_module("april_rl.train", run_name="__main__")
"""


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_mixture_of_experts_trains_with_the_experts_of_its_engine_and_resumes(task, tmp_path):
    """In the first step all samples are new and engine and learner choose the same experts, so the
    second minibatch repeats the same choices as with `learner`. Fails when another token's experts
    reach the learner, or the buffer and its checkpoint contain none.
    """
    pytest.importorskip("triton")
    write_tiny_qwen3_moe(tmp_path / "model", initializer_range=0.05)
    script = tmp_path / "script.py"
    script.write_text(INTERPRETED)
    path = ":".join(str(TESTS / folder) for folder in ("", "engine"))

    def train(name: str, *settings: str) -> list[dict[str, Any]]:
        args = command(
            task,
            tmp_path / name,
            *(f"model.path={tmp_path / 'model'}", "optimizer.lr=1e-2", "runtime.ray=false"),
            *("rollout.max_response_tokens=24", "evaluation.every=100", "deterministic=true"),
            *(
                "trainer.num_minibatches=2",
                "trainer.num_groups=2",
                "+evaluation.sets={}",
                *settings,
            ),
        )
        done = run([sys.executable, str(script), *args[3:]], tmp_path, PYTHONPATH=path)
        assert done.returncode == 0, done.stderr[-3000:]
        return steps_of(tmp_path / name)

    norms = {
        replay: train(replay, "trainer.num_steps=1", f"learner.router_replay={replay}")[0]
        for replay in ("none", "learner", "engine")
    }
    norm = {replay: row["loss/grad_norm"] for replay, row in norms.items()}
    assert norm["engine"] == pytest.approx(norm["learner"], rel=1e-4)
    assert norm["none"] != pytest.approx(norm["learner"], rel=1e-3)
    saved = {
        replay: load_file(tmp_path / replay / "checkpoints" / "step_1" / "run.safetensors")
        for replay in ("learner", "engine")
    }
    assert saved["engine"]["uint8"].size > saved["learner"]["uint8"].size == 0
    rows = train("engine", "trainer.num_steps=2", "learner.router_replay=engine", "resume=auto")
    assert len(rows) == 2
    assert rows[1]["staleness/age_max"] >= 1, "nothing was resumed"
