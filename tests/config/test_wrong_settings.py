"""A mistyped setting gives one message, in our words, for each of forty commands.

Each command runs like the command line, up to the first error.
"""

import sys
from pathlib import Path

import pytest
from printed_error import refused_training

from april_rl.start.command_line import main

RECIPES = (
    "python -m april_rl.train --help lists all recipes; your own recipe needs --config-dir FOLDER"
)
HELP = "python -m april_rl.train --cfg job prints every setting"

WRONG = [
    # a name that does not exist
    ("trainer.num_step=3", "trainer.num_step is not a setting; did you mean trainer.num_steps?"),
    ("+trainer.num_step=3", "trainer.num_step is not a setting; did you mean trainer.num_steps?"),
    ("++rollout.groupsize=4",
     "rollout.groupsize is not a setting; did you mean rollout.group_size?"),
    ("roll.group_size=3", "roll.group_size is not a setting; did you mean rollout.group_size?"),
    ("num_steps=3", "num_steps is not a setting; did you mean trainer.num_steps?"),
    ("group_size=4", "group_size is not a setting; did you mean rollout.group_size?"),
    ("optimiser.lr=1e-5", "optimiser.lr is not a setting; did you mean critic.lr or optimizer.lr?"),
    ("lora.xyz=true", "lora.xyz is not a setting; lora has rank, alpha, sync, target_modules"),
    ("+foo=1", f"foo is not a setting; {HELP}"),
    ("hydra.run.dirr=x", f"hydra.run.dirr is not a setting; {HELP}"),
    ("algorithm/loss=gspo", "algorithm/loss is not a setting; did you mean algorithm?"),
    ("evaluation.sets.test={pth: a}",
     "evaluation.sets.test.pth is not a setting; did you mean evaluation.sets.test.path?"),
    ("~trainer.nope", f"~trainer.nope removes nothing; {HELP}"),
    # a setting of another trainer
    ("+num_generations=8", "num_generations is not a setting; TRL's num_generations is here: "
     "rollout.group_size (docs/coming_from.md)"),
    ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n is not a setting; verl's "
     "actor_rollout_ref.rollout.n is here: rollout.group_size (docs/coming_from.md)"),
    ("lr=1e-4", "lr is not a setting; did you mean critic.lr or optimizer.lr?"),
    ("use_vllm=true",
     "use_vllm is not a setting; TRL's use_vllm: always vLLM (docs/coming_from.md)"),
    ("report_to=wandb", "report_to is not a setting; TRL's report_to is here: tracking.backends "
     "(docs/coming_from.md)"),
    ("output_dir=out", "output_dir is not a setting; TRL's output_dir is here: hydra.run.dir "
     "(docs/coming_from.md)"),
    ("kl_coef=0.1", "kl_coef is not a setting; slime's --kl-coef is here: "
     "algorithm.kl_coefficient (docs/coming_from.md)"),
    ("num_train_epochs=3", "num_train_epochs is not a setting; TRL's num_train_epochs is here: "
     "trainer.num_steps, in steps, never epochs (docs/coming_from.md)"),
    ("trainer.total_epochs=3", "trainer.total_epochs is not a setting; verl's trainer.total_epochs "
     "is here: trainer.num_steps, in steps, never epochs (docs/coming_from.md)"),
    ("rollout.top_p=0.9", "rollout.top_p is not a setting; verl's rollout.top_p: no top-p or top-k "
     "in training (docs/coming_from.md)"),
    ("evaluation.k=4", "evaluation.k is not a setting; did you mean evaluation.num_samples?"),
    # a choice that does not exist
    ("+recipe=absent.yaml", "there is no recipe absent.yaml; your own recipe is "
     "FOLDER/recipe/NAME.yaml: write --config-dir FOLDER +recipe=NAME"),
    ("recipe=tiny_cp", f"there is no recipe tiny_cp; did you mean tiny_cpu? {RECIPES}"),
    ("+recipe=qwen3_4b_deepmath_gspo", "there is no recipe qwen3_4b_deepmath_gspo; did you mean "
     f"paper/qwen3_4b_deepmath_gspo? {RECIPES}"),
    ("algorithm=sft",
     "there is no algorithm sft; Known: cispo, dapo, dppo, dr_grpo, grpo, gspo, ppo"),
    ("algorithm=dapoo",
     "there is no algorithm dapoo; did you mean dapo? Known: cispo, dapo, dppo, dr_grpo, grpo, "
     "gspo, ppo"),
    ("+sweep=alphaa", "there is no sweep alphaa; did you mean alpha? Known: alpha"),
    # a value of another type
    ("trainer.num_steps=abc", "trainer.num_steps must be a whole number, got abc"),
    ("trainer.num_steps=2.5", "trainer.num_steps must be a whole number, got 2.5"),
    ("trainer.num_steps=null", "trainer.num_steps must be a whole number, got null"),
    ("optimizer.lr=big", "optimizer.lr must be a number, got big"),
    ("deterministic=maybe", "deterministic must be true or false, got maybe"),
    ("rollout.on_stale=skip", "rollout.on_stale must be finish or mask, got skip"),
    ("rollout.tick_steps=[1]", "rollout.tick_steps must be a whole number or auto, got [1]"),
    ("tracking.backends=[mlflow]", "tracking.backends[0] must be "
     "wandb or trackio or tensorboard, got mlflow"),
    ("lora.target_modules=q_proj",
     "lora.target_modules must be a list in brackets, each entry text or null, got q_proj"),
    ("data.path=[a,b]", "data.path must be text, got [a,b]"),
    ("evaluation.sets.test=a.jsonl", "evaluation.sets.test must be a section: set "
     "evaluation.sets.test.path, evaluation.sets.test.split, evaluation.sets.test.prompt_column, "
     "..., got a.jsonl"),
    ("trainer=3", "trainer must be a section: set trainer.num_steps, trainer.num_groups, "
     "trainer.num_minibatches, ..., got 3"),
    ("reward.args=3", "reward.args must be a mapping such as {name: value}, or null, got 3"),
    ("evaluation.sets=x", "evaluation.sets must be a mapping such as {name: value}, or null, "
     "got x"),
    # a text that cannot be read
    ("data.answer_pattern=(unclosed", "the value of data.answer_pattern cannot be read: (unclosed. "
     "Put it into two kinds of quotes, 'data.answer_pattern=\"(unclosed\"'"),
    ("trainer.num_steps", "trainer.num_steps has no value: write trainer.num_steps=VALUE"),
    ("tiny_cpu", "tiny_cpu is a recipe: write +recipe=tiny_cpu"),
    ("trainer.num_steps=1,2",
     "trainer.num_steps=1,2 has several values: add --multirun, or [a,b] for a list"),
    ("trainer.num_steps=${x}", "trainer.num_steps refers to x, which is not a setting"),
    ("model.path=${a.b}", "model.path refers to a.b, which is not a setting"),
    ("model.path=${oc.env:NOPE}",
     "model.path refers to the environment variable NOPE, which is not set"),
    ("model.path=${nope:x}", "model.path refers to what cannot be read: write ${NAME} for a "
     "setting, ${oc.env:NAME} for an environment variable"),
    ("mine.yaml", "mine.yaml is not key=value; your own recipe is FOLDER/recipe/NAME.yaml: write "
     "--config-dir FOLDER +recipe=NAME"),
    ("--config=mine.yaml", "--config is not an option: your own recipe is "
     "FOLDER/recipe/NAME.yaml: write --config-dir FOLDER +recipe=NAME"),
    ("--config-name=mine", "--config-name is not an option: your own recipe is "
     "FOLDER/recipe/NAME.yaml: write --config-dir FOLDER +recipe=NAME"),
    ("--recipe=tiny_gpu", "--recipe is not an option: write +recipe=tiny_gpu"),
    ("--num_steps=3", "--num_steps is not an option. Settings are written KEY=VALUE, and num_steps "
     "is not a setting; did you mean trainer.num_steps?"),
    ("--lr=1e-4", "--lr is not an option. Settings are written KEY=VALUE, and lr is not a setting; "
     "did you mean critic.lr or optimizer.lr?"),
    ("--trainer.num_steps=5", "--trainer.num_steps is not an option: write trainer.num_steps=5"),
    ("hydra.run.dir=out/n=guess:Gu", "the value of hydra.run.dir cannot be read: out/n=guess:Gu. "
     "Put it into two kinds of quotes, 'hydra.run.dir=\"out/n=guess:Gu\"'"),
    ("--cfg=jobs",
     "argument --cfg/-c: invalid choice: 'jobs' (choose from 'job', 'hydra', 'all')"),
    # a value out of range
    ("rollout.group_size=0", "rollout.group_size must be >= 1, got 0"),
    ("rollout.over_sampling_factor=two",
     "rollout.over_sampling_factor must be a number, got two"),
    ("reward.function=my_rewards.py:exact", "reward.function must be module:function, got "
     "my_rewards.py:exact; did you mean my_rewards:exact?"),
    ("reward.function=my_rewards.exact", "reward.function must be module:function, got "
     "my_rewards.exact; did you mean my_rewards:exact?"),
    ("reward.function=exakt", "reward.function must be module:function or one of math_verify, "
     "exact, last_number, format, length, code, judge, reward_model, reasoning_gym, environment, "
     "got exakt; did you mean exact?"),
    ("environment.function=./agents/mine.py:run", "environment.function must be module:Class or "
     "module:function, got ./agents/mine.py:run; did you mean agents.mine:run?"),
    ("learner.age_weight=ages.py", "learner.age_weight must be null or module:function, got "
     "ages.py; write ages:NAME for your own function"),
    ("tracking.backends=[trackio,wandbb]", "tracking.backends[1] must be wandb or trackio or "
     "tensorboard, got wandbb"),
    ("algorithm.loss=grpo", "algorithm.loss takes a part of an algorithm, got grpo: write "
     "algorithm=grpo for all of it, or algorithm.loss=ppo_clip"),
    ("algorithm.loss=ppo_clp", "algorithm.loss must be module:function or one of ppo_clip, gspo, "
     "cispo, sapo, dppo_tv, dppo_kl, policy_gradient, got ppo_clp; did you mean "
     "ppo_clip?"),
    ("resume=", "resume is empty: write resume=null, or remove it"),
    ("engine.max_model_len=0", "engine.max_model_len must be >= 1 or auto, got 0"),
    ("learner.shard_size=0", "learner.shard_size must be >= 1 or null, got 0"),
    ("lora.rank=0", "lora.rank must be >= 1 or null, got 0"),
    *((f"learner.activation_checkpointing={value}",
       f"learner.activation_checkpointing must be in [0, 1] or auto, got {value}")
      for value in ("1.5", "-1", "some")),
    ("learner.keep_attention=some",
     "learner.keep_attention must be true, false or auto, got some"),
    ("teacher.path=", "teacher.path is empty: write teacher.path=null, or remove it"),
    ("data.system_prompt=''", "data.system_prompt is empty: write data.system_prompt=null, or "
     "remove it"),
    ("resume=true", "resume must be auto, a path or null, got True; write resume=auto"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[wrong for wrong, _ in WRONG])
def test_a_wrong_setting_is_named_with_the_accepted_values(
    tmp_path: Path, capsys, monkeypatch, wrong, message
) -> None:
    """Fails when the user sees a line from Hydra, OmegaConf or argparse."""
    recipe = [] if "recipe" in wrong else ["+recipe=tiny_cpu"]
    words = [*recipe, wrong, f"hydra.run.dir={tmp_path / 'run'}"]
    assert refused_training(words, capsys, monkeypatch) == f"{message}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.num_steps", "5"],
         "--trainer.num_steps is not an option: write trainer.num_steps=5"),
        (["--trainer.num-steps", "seed=5"],
         "--trainer.num-steps is not an option: write trainer.num_steps=VALUE"),
        (["--recipe", "tiny_gpu"], "--recipe is not an option: write +recipe=tiny_gpu"),
        (["--config", "mine.yaml"], "--config is not an option: your own recipe is "
         "FOLDER/recipe/NAME.yaml: write --config-dir FOLDER +recipe=NAME"),
        (["--cfg", "job", "data.args={}"],
         "data.args={} stands behind --cfg job: put settings before --cfg job"),
        (["--multirun", "seed=1,2", "optimizer.lr=1e-6"],
         "seed=1,2 stands behind --multirun: put settings before --multirun"),
        (["+evaluation.sets.x={path:", "data/test.jsonl}"],
         "the shell has split evaluation.sets.x={path: at the space; put the whole word into "
         "quotes: '+evaluation.sets.x={path: data/test.jsonl}'"),
        (["reward.args={a:", "[1,", "2]}", "seed=1"],
         "the shell has split reward.args={a: at the space; put the whole word into quotes: "
         "'reward.args={a: [1, 2]}'"),
    ],
)  # fmt: skip
def test_a_setting_in_two_words_gives_an_error_with_the_right_form(
    tmp_path: Path, capsys, monkeypatch, words: list[str], message: str
) -> None:
    words = ["+recipe=tiny_cpu", f"hydra.run.dir={tmp_path / 'run'}", *words]
    assert refused_training(words, capsys, monkeypatch) == f"{message}\n"


def test_the_position_of_a_plus_does_not_matter(capsys, monkeypatch) -> None:
    outputs = set()
    for words in (["recipe=tiny_cpu", "+seed=3"], ["+recipe=tiny_cpu", "seed=3"]):
        monkeypatch.setattr(sys, "argv", ["april_rl.train", *words, "--cfg", "job"])
        main()
        outputs.add(capsys.readouterr().out)
    assert len(outputs) == 1
    assert "seed: 3" in outputs.pop()
