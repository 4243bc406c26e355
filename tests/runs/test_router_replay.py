"""`learner.router_replay` through the command."""

from pathlib import Path

import pytest
from command_line import command, refusal, run, steps_of, write_task
from tiny_architectures import tiny_config
from tiny_models import write_tiny_qwen3_moe

SETTINGS = ("learner.router_replay=learner", "trainer.num_minibatches=2")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_mixture_of_experts_trains_with_repeated_choices(task, tmp_path):
    """With a step so large that experts change. Fails when the setting does not reach the learner:
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


@pytest.mark.filterwarnings("ignore")  # of transformers, about tiny configurations
@pytest.mark.parametrize("model_type", ["qwen3", "phimoe"])
def test_a_model_without_a_known_router_is_refused_by_name(model_type, task, tmp_path):
    """One is dense, the other samples its experts in a way of its own. The folder has no weights:
    fails when a worker starts first.
    """
    tiny_config(model_type, max_position_embeddings=512).save_pretrained(tmp_path / "model")
    message = refusal(task, tmp_path, f"model.path={tmp_path / 'model'}", *SETTINGS)
    assert f"learner.router_replay=learner: model_type {model_type} has no router" in message
