"""A rehearsal finds what is wrong with a recipe before GPUs are rented, and names it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from byte_tokenizer import hf_byte_tokenizer
from source_tree import ROOT

from april_rl.__main__ import main
from april_rl.config import to_config
from april_rl.config.lora import LoraConfig
from april_rl.config.prompt_sets import training_sets
from april_rl.config.store import compose_overrides, recipes
from april_rl.lab.price.assumptions import Assumptions
from april_rl.lab.rehearsal import stand_ins
from april_rl.lab.rehearsal.findings import share_longer_than
from april_rl.lab.rehearsal.small_run import small_run
from april_rl.lab.rehearsal.tiny_model import write_tiny_model
from april_rl.start.planning.model import read_model
from april_rl.training.learner.model.model_sizes import model_sizes

FLAGSHIP = "+recipe=qwen3_4b_dapo"


IN_SUITE = ("qwen3_4b_lora", "r1_distill_1_5b_python")
# `make soak` rehearses all recipes, each of which takes seconds.
REHEARSED = [
    pytest.param(recipe, marks=() if recipe in IN_SUITE else pytest.mark.soak)
    for recipe in sorted(recipes())
]
PLANTED: list[tuple[list[str], str, str]] = [
    (["reward.extract=boxed"], "reward_form", "ask for the form 'answer_line'"),
    (["algorithm.overlong_penalty=1.0"], "overlong_penalty", "more than half"),
    (
        ["rollout.max_response_tokens=16384", "algorithm.overlong_buffer_frac=0.25"],
        "overlong_zone",
        "begins at 12,288 tokens",
    ),
    (["data.deduplicate=false"], "duplicates", "3 of 11 rows repeat"),
    (
        ["rollout.over_sampling_factor=2", "engine.gpu_memory_utilization=0.6"],
        "kv_cache",
        "engine.gpu_memory_utilization",
    ),
    (["trainer.num_minibatches=1"], "one_update", "makes every ratio 1"),
    (["~evaluation.sets.aime24"], "no_evaluation", "evaluation.sets is empty"),
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work as on a machine without a network: rows in the published schemas replace the
    data sets.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def quick(tmp_path: Path, *overrides: str) -> int:
    return main(["rehearse", *overrides, "quick=true", f"output={tmp_path / 'rehearsal'}"])


def rehearse_command(recipe: str) -> list[str]:
    """Return the arguments that the header of a recipe gives, or the recipe alone."""
    header = recipes()[recipe].read_text().partition("\ndefaults:")[0]
    _, is_there, words = header.partition("# Rehearse: python -m april_rl rehearse ")
    return words.split("\n")[0].split() if is_there else [f"+recipe={recipe}"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", REHEARSED)
def test_no_recipe_is_flagged(tmp_path, capsys, recipe):
    """By the command in its header, which may accept findings by name."""
    status = quick(tmp_path, *rehearse_command(recipe))
    printed = capsys.readouterr().out
    assert "nothing is flagged" in printed, printed
    assert status == 0


@pytest.mark.slow
def test_every_planted_fault_is_flagged_by_its_name(tmp_path, capsys):
    """All faults that the flagship once had, at once, and two typical mistakes of users."""
    faults = (override for fault in PLANTED for override in fault[0])
    status = quick(tmp_path, *rehearse_command("qwen3_4b_dapo"), *faults)
    printed = capsys.readouterr().out
    flagged = [line for line in printed.splitlines() if line.startswith("FLAGGED")]
    for _, name, said in PLANTED:
        assert any(line.split()[1] == f"{name}:" and said in line for line in flagged), name
    assert status == 1


@pytest.mark.slow
def test_tests_that_check_nothing_are_flagged_with_their_row(tmp_path, capsys):
    path = tmp_path / "tasks.jsonl"
    row = {"question": "Write double.", "answer": "1", "tests": '{"fn_name": "double"}'}
    path.write_text(json.dumps(row) + "\n")
    settings = (f"data.path={path}", "data.answer_pattern=null", "~evaluation.sets.gsm8k")
    reward = ("reward.function=code", "reward.args={sandbox: none}")
    assert quick(tmp_path, "+recipe=qwen3_0_6b_smoke", *settings, *reward) == 1
    flagged = {x.split()[0]: x for x in capsys.readouterr().out.split("FLAGGED")[1:]}
    assert f"{path}:1: reward.function=code raised ValueError: the tests of" in flagged["tests:"]
    assert "reward_blind:" not in flagged, "no stated answer is right or wrong here"


@pytest.mark.slow
def test_a_reward_that_pays_for_nothing_is_flagged_with_the_command_that_shows_it(tmp_path, capsys):
    reward = "reward.function=attacked_rewards:any_box"
    assert quick(tmp_path, "+recipe=qwen3_0_6b_smoke", reward) == 1
    printed = capsys.readouterr().out
    assert "paid_for_nothing: data.path: the reward pays for several, thoughts_only" in printed
    assert "python -m april_rl attack" in printed


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_flagged_and_an_accepted_finding_is_not(tmp_path, capsys):
    changes = ("model.path=Qwen/Qwen3-8B", "runtime.num_workers=1", "trainer.num_minibatches=1")
    assert quick(tmp_path, FLAGSHIP, *changes, "accept=one_update,duplicates") == 1
    printed = capsys.readouterr().out
    assert "FLAGGED     memory: this run does not fit into memory" in printed
    assert "accepted    one_update:" in printed
    assert "accept names duplicates, which was not found" in printed


@pytest.mark.slow
def test_a_quick_rehearsal_loads_the_environment_and_names_what_it_leaves_out(tmp_path, capsys):
    wrong = "environment.function=april_rl.task.environments.tiny_sums:_TERM"
    assert quick(tmp_path, *rehearse_command("tiny_tools_cpu"), wrong) == 1
    printed = capsys.readouterr().out
    assert (
        "FLAGGED     environment: environment.function=april_rl.task.environments.tiny_sums:_TERM"
        in printed
    )
    assert "not tried   gain, steps and episodes of environments" in printed


@pytest.fixture
def of_bytes(tmp_path: Path) -> str:
    """Return the override for a model with the sizes of Qwen3-4B and a token for each byte."""
    published, folder = stand_ins.model_config("Qwen/Qwen3-4B"), tmp_path / "of_bytes"
    assert published is not None
    tokenizer = hf_byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = json.loads(Path(published, "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(tokenizer)}))
    (folder / "model.safetensors").touch()  # a rehearsal does not read weights
    return f"model.path={folder}"


@pytest.mark.slow
@pytest.mark.cpu_engine
@pytest.mark.parametrize("has_stand_in", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_two_steps_go_through_every_stage(tmp_path, capsys, of_bytes, has_stand_in):
    """Rollout, reward, filter, update, weight sync, checkpoint, evaluation; on the real engine, in
    this process, as on one large GPU. The 152k tokens of the stand-in take most of the time.
    """
    folder = tmp_path / "rehearsal"
    here = ["runtime.num_workers=1", "gpu_gib=160", "runtime.ray=false", "runtime.threads=1"]
    model = [] if has_stand_in else [of_bytes]
    status = main(["rehearse", FLAGSHIP, *here, *model, "accept=kv_cache", f"output={folder}"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "α = 2" in printed
    assert (folder / "run" / "exports" / "step_2" / "config.json").is_file()
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert (folder / "report.txt").read_text().strip().endswith(" s")


def test_a_wrong_argument_ends_in_one_message(capsys):
    assert main(["rehearse", FLAGSHIP, "gpu_gib=none"]) == 1
    assert capsys.readouterr().err == "error: gpu_gib must be a number > 0, got none\n"


def test_the_share_of_long_responses_matches_the_lognormal_lengths():
    """Compared with 200,000 lengths drawn from the same distribution."""
    from april_rl.types import SampleId

    config = to_config(compose_overrides([FLAGSHIP]))
    assumed = Assumptions(mean_response_tokens=10_000, sigma=0.9)
    length_of = assumed.length_of(config)
    drawn = sum(length_of(SampleId(number, 0)) > 16_384 for number in range(20_000)) / 20_000
    assert share_longer_than(16_384, config, assumed) == pytest.approx(drawn, abs=0.01)


@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [
        ("Qwen/Qwen3-0.6B", 0.596e9),
        ("Qwen/Qwen3-1.7B", 1.72e9),
        ("Qwen/Qwen3-4B", 4.02e9),
        ("Qwen/Qwen3-8B", 8.19e9),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.78e9),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134.5e6),
        ("zai-org/GLM-4-9B-0414", 9.40e9),
        ("Qwen/Qwen3.5-4B", 4.21e9),  # without its image encoder
        ("Qwen/Qwen3-30B-A3B", 30.5e9),
    ],
)
def test_the_stand_in_of_a_model_has_its_published_size(model, num_parameters):
    config = stand_ins.model_config(model)
    assert config is not None
    sizes = model_sizes(read_model(config), LoraConfig())
    assert sizes.num_parameters == pytest.approx(num_parameters, rel=0.005)


def test_a_tiny_model_has_room_for_the_tokenizer_of_another_model(tmp_path):
    """Qwen3's tokenizer, which is the stand-in, has more tokens than GLM-4's vocabulary."""
    path = stand_ins.model_config("zai-org/GLM-4-9B-0414")
    assert path is not None
    num_tokens = 151_669
    write_tiny_model(tmp_path, config_path=path, num_tokens=num_tokens)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == num_tokens


@pytest.mark.parametrize(("replay", "rehearsed"), [("engine", "learner"), ("none", "none")])
def test_a_rehearsal_does_not_repeat_experts_of_an_engine(replay, rehearsed):
    """Fails when it ends with the message that engines on CPUs do not report experts."""
    config = to_config(compose_overrides(["+recipe=tiny_cpu", f"learner.router_replay={replay}"]))
    small = small_run(config, model="folder", rows={}, held_out={})
    assert small.learner.router_replay.value == rehearsed


@pytest.mark.slow
def test_every_recipe_has_a_stand_in_for_its_model_and_its_data():
    for name in recipes():
        config = to_config(compose_overrides([f"+recipe={name}"]))
        sets = [*training_sets(config.data).values(), *config.evaluation.sets.values()]
        paths = [chosen.path for chosen in sets]
        paths = [path for path in paths if not path.startswith(("builtin:", "reasoning_gym:"))]
        assert all(stand_ins.rows(path) for path in paths), (name, paths)
        is_builtin = config.model.path.startswith("builtin:")
        assert is_builtin or stand_ins.model_config(config.model.path), name


@pytest.mark.slow
def test_the_command_of_the_page_of_recipes_flags_nothing_in_its_recipe(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    page = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"python -m april_rl rehearse (--config-dir .*)", page)
    for name, language in (("conf/recipe/mine.yaml", "yaml"), ("my_rewards.py", "python")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (text,) = re.findall(rf"```{language}\n(.*?)```", page, flags=re.S)
        (tmp_path / name).write_text(text)
    for name, start in (("train", 0), ("test", 1000)):
        rows = [
            {"question": f"{n} + {n % 7}?", "answer": f"{n + n % 7}"}
            for n in range(start, start + 40)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["rehearse", *shlex.split(command), "quick=true"]) == 0, capsys.readouterr().out
    recipes.cache_clear()
