"""Partial rollouts under TRL, in an environment with `requirements/trl.txt` (docs/trl.md)."""

import shutil
from pathlib import Path

import pytest
from trl_runs import WITH_TRL, check_every_row_once, run, steps_of

pytestmark = WITH_TRL


@pytest.fixture(scope="module")
def partial(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("partial")
    return folder, run(folder, steps=8, over_sampling_factor=1.5)


@pytest.mark.parametrize("lora", [False, True])
def test_without_over_sampling_it_is_bit_identical_to_trl_alone(lora, tmp_path):
    """Fails when rows, tokens or losses differ from a trainer without our changes."""
    alone = run(tmp_path / "alone", lora=lora)
    ours = run(tmp_path / "ours", lora=lora, over_sampling_factor=1, refill=False)
    assert ours["batches"] == alone["batches"]
    for own, other in zip(steps_of(ours), steps_of(alone), strict=True):
        assert own.pop("april/age_max") == 0
        for key in other.keys() - {"step_time"}:
            assert own[key] == other[key], key


def test_batches_mix_fresh_and_resumed_samples_in_whole_groups(partial):
    _, found = partial
    steps = steps_of(found)
    assert steps[0]["april/age_max"] == 0
    assert max(step["april/age_max"] for step in steps) >= 1
    assert all(step["april/age_max"] <= 8 for step in steps)
    assert any(0 < step["april/off_policy_frac"] < 1 for step in steps)
    assert max(step["april/resumed_frac"] for step in steps) > 0
    for batch in found["batches"]:
        assert len(batch["rows"]) == 32
        assert all(len(set(batch["rows"][i : i + 4])) == 1 for i in range(0, 32, 4))


def test_every_row_of_an_epoch_is_trained_once_or_parked(partial):
    folder, found = partial
    check_every_row_once(found["batches"], folder / "checkpoint-8")


def test_a_resumed_run_continues_with_what_was_parked(partial, tmp_path):
    """Fails when parked groups, or their position in the stream of rows, are lost."""
    folder, found = partial
    shutil.copytree(folder / "checkpoint-4", tmp_path / "checkpoint-4")
    resume = str(tmp_path / "checkpoint-4")
    again = run(tmp_path, steps=6, over_sampling_factor=1.5, resume=resume)
    steps = [step for step in steps_of(again) if step["step"] > 4]
    assert [step["step"] for step in steps] == [5, 6]
    assert max(step["april/resumed_frac"] for step in steps) > 0
    batches = [*found["batches"][:4], *again["batches"]]
    check_every_row_once(batches, tmp_path / "checkpoint-6")


@pytest.mark.parametrize(
    "grpo",
    [
        {"num_iterations": 2, "steps_per_generation": 4},
        {"loss_type": "dr_grpo", "mask_truncated_completions": True, "beta": 0.1},
        {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4},
    ],
)
def test_it_works_with_other_arguments_of_trl(grpo, tmp_path):
    found = run(tmp_path, over_sampling_factor=1.5, grpo=grpo, chat=True, lora="beta" in grpo)
    assert [step["step"] for step in steps_of(found)] == [1, 2, 3, 4]
    assert ("eval_strategy" in grpo) == any("eval_reward" in row for row in found["log"])


@pytest.mark.parametrize(
    "grpo",
    [
        {"vllm_structured_outputs_regex": "[0-9]{1,9}"},
        {"generation_kwargs": {"structured_outputs": {"regex": "[0-9]{1,9}"}, "min_tokens": 2}},
        {"generation_kwargs": {"max_tokens": 7}},
    ],
)
def test_sampling_settings_of_trl_have_the_same_effect_as_in_trl_alone(grpo, tmp_path):
    alone = run(tmp_path / "alone", grpo=grpo, steps=2)
    ours = run(tmp_path / "ours", grpo=grpo, steps=2, over_sampling_factor=1, refill=False)
    assert ours["batches"] == alone["batches"]
    lengths = [len(tokens) for batch in ours["batches"] for tokens in batch["tokens"]]
    assert max(lengths) <= 10


def test_a_limit_in_generation_kwargs_applies_to_a_whole_resumed_completion(tmp_path):
    grpo = {"generation_kwargs": {"max_tokens": 7, "min_tokens": 5}}
    found = run(tmp_path, grpo=grpo, over_sampling_factor=1.5, steps=3)
    assert {len(tokens) for batch in found["batches"] for tokens in batch["tokens"]} <= {5, 6, 7}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"over_sampling_factor": 1.5, "grpo": {"vllm_importance_sampling_correction": False}},
            "partial rollouts need vllm_importance_sampling_correction=True",
        ),
        ({"over_sampling_factor": 0.5}, "partial rollouts need over_sampling_factor >= 1"),
        (
            {"over_sampling_factor": 1.5, "grpo": {"use_vllm": False}},
            "partial rollouts need use_vllm=True and vllm_mode=colocate",
        ),
        (
            {"over_sampling_factor": 1.5, "streamed": True},
            "partial rollouts need a train_dataset with a length",
        ),
        (
            {"over_sampling_factor": 1.5, "grpo": {"vllm_structured_outputs_regex": "[0-9]+"}},
            "vllm_structured_outputs_regex cannot be used with partial rollouts: it looks at all",
        ),
        (
            {"over_sampling_factor": 1, "grpo": {"generation_kwargs": {"presence_penalty": 1.0}}},
            "presence_penalty cannot be used with partial rollouts: it looks at all tokens",
        ),
        (
            {"over_sampling_factor": 1.5, "packed": True},
            "vLLM's CPU build has packed the weights of this engine",
        ),
    ],
)
def test_unsupported_arguments_are_refused_by_name(settings, message, tmp_path):
    assert run(tmp_path, **settings)["refused"].startswith(message)
