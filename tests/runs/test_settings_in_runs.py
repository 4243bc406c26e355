"""Short runs with settings that no other run has; each is recognised by an effect of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_here, steps_of
from judge_server import says, serving
from test_rewards_model import write_classifier

TINY = (
    *("+recipe=tiny_cpu", "~evaluation.sets.held_out", "trainer.num_groups=4"),
    *("rollout.group_size=4", "rollout.over_sampling_factor=2", "deterministic=true"),
)


def steps(run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    run_here(None, run_dir, *TINY, *overrides)
    return steps_of(run_dir)


@pytest.mark.slow
def test_a_loss_a_mask_a_moving_reference_a_sampler_and_a_drained_step_act(tmp_path: Path) -> None:
    """`learner.activation_checkpointing` changes no number: this run only shows that it works with
    the others, and tests/training/learner compares its gradients.
    """
    rows = steps(
        tmp_path,
        *("trainer.num_steps=3", "optimizer.lr=1e-2", "rollout.max_response_tokens=48"),
        *("algorithm.loss=sapo", "algorithm.ratio=behaviour", "algorithm.correction=none"),
        *("algorithm.kl=k1", "algorithm.kl_coefficient=0.01", "algorithm.reference_every=2"),
        *("algorithm.opsm_threshold=1e-3", "learner.activation_checkpointing=true"),
        *("data.sampler=pass_rate", "rollout.drain_steps=1"),
    )
    first, second, third = rows
    assert second["loss/ratio_max"] > 1.28  # where ppo_clip would clip
    assert second["loss/clip_frac"] == 0
    assert first["loss/masked_frac"] == 0 < second["loss/masked_frac"] < 1
    assert (
        first["loss/reference_kl"] == third["loss/reference_kl"] == 0 != second["loss/reference_kl"]
    )
    assert first["ledger/opened"] < second["ledger/opened"] == third["ledger/opened"]
    drawn = json.loads((tmp_path / "checkpoints/step_3/run.json").read_text())["prompts"]
    assert drawn["sampler_name"] == "ByPassRate"
    assert len(drawn["sampler"]["known"]) >= 12  # the prompts of the trained groups


@pytest.mark.slow
def test_responses_at_the_budget_are_not_trained(tmp_path: Path) -> None:
    """Apart from the run above, because every response has to be cut off."""
    (row,) = steps(
        tmp_path,
        *("trainer.num_steps=1", "rollout.max_response_tokens=4", "algorithm.mask_truncated=true"),
        "reward.function=reward_functions:rank",
    )
    assert row["rollout/truncated_frac"] == 1
    assert row["reward/no_signal_frac"] < 1
    assert row["loss/grad_norm"] == 0


@pytest.mark.slow
def test_a_geometric_mask_leaves_out_responses_that_the_policy_has_left(tmp_path: Path) -> None:
    """Apart from the first run, whose metric counts the tokens of all masks together."""
    first, second = steps(
        tmp_path,
        *("trainer.num_steps=2", "rollout.max_response_tokens=48", "optimizer.lr=1e-2"),
        "algorithm.geometric_mask=[0.99,1.01]",
    )
    assert first["loss/masked_frac"] == 0 < second["loss/masked_frac"]


@pytest.mark.slow
@pytest.mark.soak
def test_a_judge_and_a_reward_model_score_one_run(tmp_path: Path) -> None:
    """Speculation is left out: with it vLLM's build for CPUs ends here with errors of its
    own (AttributeError while it registers kernels, a deprecation of numba).
    tests/training/runtime/test_gpu_engine.py runs it on a GPU.
    """
    model = write_classifier(tmp_path / "classifier")
    with serving(lambda number, _: says(f"Verdict: {'yes' if number % 2 else 'no'}")) as server:
        judge = f"{{function: judge, args: {{base_url: '{server.url}', model: stub}}}}"
        likes = f"{{path: {model}, template: '{{prompt}}{{response}}', sigmoid: true}}"
        (row,) = steps(
            tmp_path / "run",
            *("trainer.num_steps=1", "reward.num_processes=1"),
            *("rollout.max_response_tokens=48", "reward.hard_timeout_s=100"),
            f"+reward.functions.judged={judge}",
            f"+reward.functions.liked={{function: reward_model, args: {likes}}}",
        )
    assert len(server.requests) >= 16
    assert 0 < row["reward/judged/mean"] < 1
    assert 0 < row["reward/liked/mean"] < 1
    assert row["reward/errors"] == 0
