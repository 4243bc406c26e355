"""Bad input ends a run with one message that names the key, exit status 1 and no traceback."""

from pathlib import Path

import pytest
from command_line import command, refusal, run

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]


def refused_by_the_program(task: Path | None, cwd: Path, *overrides: str) -> str:
    done = run(command(task, cwd / "run", *overrides), cwd)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    messages = done.stderr.split("error: ", 1)
    assert len(messages) == 2, done.stderr
    return messages[1]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.group_size=1", "rollout.group_size must be >= 2"),
        ("rollout.max_response_tokens=5000", "learner.max_tokens"),
        ("model.path=absent/model", "model.path=absent/model"),
        ("model.path=builtin:foo", "model.path=builtin:foo: no such builtin"),
        ("data.path=builtin:foo", "data.path=builtin:foo: no such builtin"),
        (
            "+evaluation.sets.test={path: builtin:foo}",
            "evaluation.sets.test.path=builtin:foo: no such builtin",
        ),
        ("data.template=chat", "chat template"),
        ("data.max_prompt_tokens=1", "data.max_prompt_tokens=1"),
        ("reward.function=no_such_module:score", "reward.function=no_such_module:score"),
        ("reward.function=reward_functions:returns_nan", "returned nan as a reward"),
        ("runtime.device=gpu", "runtime.device=gpu needs a GPU, and this machine has none"),
        ("learner.shard_size=2", "runtime.num_workers must be a multiple of learner.shard_size=2"),
    ],
)
def test_a_setting_that_cannot_work_is_named(task, tmp_path, override, said):
    assert said in refusal(task, tmp_path, override)


def test_a_step_of_more_groups_than_prompts_says_so(task, tmp_path, capsys):
    """There are sixty prompts. Fails when prompts silently come several times into one batch."""
    for num_groups in (60, 61):
        refusal(
            task,
            tmp_path,
            f"trainer.num_groups={num_groups}",
            "reward.function=reward_functions:returns_nan",
        )
        printed = capsys.readouterr()
        said = "trainer.num_groups=61 is more than the 60 prompts" in printed.out + printed.err
        assert said == (num_groups == 61)


def test_workers_get_the_model_folder_as_an_absolute_path(task, tmp_path, monkeypatch):
    """Workers of a cluster start in another directory, where a relative path would look like a hub
    id.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "model" / "model.safetensors").touch()
    assert f"model.path={tmp_path}/model: " in refusal(task, tmp_path, "model.path=model")


def test_a_reward_without_enough_memory_names_its_limit(task, tmp_path):
    """Fails when user_code.memory_gib does not reach the reward's process."""
    function = "reward.function=reward_functions:reserves_2_gib"
    assert "memory_gib of its process is 1" in refusal(
        task, tmp_path, function, "user_code.memory_gib=1"
    )


@pytest.mark.soak
def test_too_little_memory_for_the_kv_cache_names_the_setting(task, tmp_path):
    """The engine checks this itself, in the worker's process."""
    assert "engine.kv_cache_gib" in refused_by_the_program(
        task, tmp_path, "engine.kv_cache_gib=100000"
    )


def test_a_run_directory_that_cannot_be_written_is_named(task, tmp_path):
    message = refused_by_the_program(task, tmp_path, "hydra.run.dir=/dev/null/run")
    assert message.startswith("hydra.run.dir=/dev/null/run cannot be written")


def test_the_recipe_for_gpus_lists_everything_that_is_missing_at_once(tmp_path):
    message = refusal(None, tmp_path, "+recipe=qwen3_4b_dapo")
    for missing in ("GPUs: runtime.num_workers=8", "- model.path=Qwen"):
        assert missing in message
