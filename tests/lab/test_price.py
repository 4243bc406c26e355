"""`python -m april_rl plan`: what a run fits on, takes and costs, compared with published runs and
with steps that were counted by hand.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from composed_config import load
from planned_models import sizes_of
from report_runs import make_run
from shapes import shape_by_name
from transformers import Qwen3_5MoeTextConfig

from april_rl.__main__ import main
from april_rl.config.lora import LoraConfig
from april_rl.lab.price.assumptions import Assumptions
from april_rl.lab.price.gpus import Gpus
from april_rl.lab.price.memory import RealMemory, real_memory
from april_rl.lab.price.plan import plan_on, plan_text
from april_rl.lab.price.prediction import StepPrice, step_prices, work_of
from april_rl.lab.price.step_cost import TrainedTokens, update_s
from april_rl.lab.rehearsal.real_models import shape_of
from april_rl.lab.report.run_files import RunFiles, read_run
from april_rl.lab.simulator.engine_cost import EngineWork
from april_rl.lab.simulator.gpu_kinds import GPU_KINDS
from april_rl.lab.simulator.model_cost import ModelCost, Shape
from april_rl.lab.simulator.prediction import SYNCHRONOUS, Mode
from april_rl.lab.simulator.recorded_lengths import RecordingError, read_lengths
from april_rl.start.planning.facts import Models
from april_rl.start.planning.memory_inputs import Beside
from april_rl.training.learner.model.model_sizes import model_sizes
from april_rl.training.learner.model.sizes import ModelSizes

H100 = GPU_KINDS["h100"]
REFILL = Mode(1.0, refill=True)
SMALL = ["+recipe=qwen3_0_6b_gsm8k", "mean_response_tokens=300", "prompt_tokens=100"]


def published(
    shape: Shape, sizes: ModelSizes, *, mean: float, modes: list[Mode], **settings: object
) -> list[StepPrice]:
    """Return the price of a published run on H100s: its settings, and the mean of its lengths."""
    chosen = {"algorithm.dynamic_sampling": "false", "learner.offload": "all", **settings}
    config = load("+recipe=qwen3_4b_dapo", *(f"{key}={value}" for key, value in chosen.items()))
    memory = real_memory(config, Models(policy=sizes, beside=Beside()), gpu_gib=H100.gib)
    assumed = Assumptions(mean_response_tokens=mean, prompt_tokens=150)
    return step_prices(
        memory, work_of(config, assumed, shape=shape), rates=H100.rates(), modes=modes
    )


# Cost of an engine.


def test_a_step_reads_the_experts_that_its_tokens_choose():
    """A token chooses 8 of 128 experts: one token reads a 16th of them, and 256 tokens read all."""
    shape = shape_by_name("Qwen/Qwen3-30B-A3B")
    assert shape.chosen_share == 8 / 128
    assert shape.num_multiplied == pytest.approx(3.04e9, rel=0.01)
    assert shape.num_read(1) == pytest.approx(30.53e9 - 15 / 16 * 28.99e9, rel=0.001)
    assert shape.num_read(256) == pytest.approx(30.53e9, rel=0.001)
    assert shape_by_name("4B").num_read(1) == sizes_of("4B").num_parameters


def test_decoding_is_limited_by_memory_and_then_by_arithmetic():
    """Fails when a step takes the sum of both, or one of them alone."""
    cost = ModelCost(shape=shape_by_name("4B"), rates=H100.rates())

    def step_s(batch: int, context: int) -> float:
        return cost.seconds(EngineWork(1, batch, batch * context))

    # 8.04 GB of weights and 40 × 6,600 tokens of 147 KB at 2.68 TB/s; layers and launch 1 ms.
    assert step_s(40, 6600) == pytest.approx(
        (8.04e9 + 40 * 6600 * 147_456) / 2.68e12 + 1.02e-3, 0.01
    )
    assert step_s(64, 0) == pytest.approx(step_s(1, 0), rel=0.001)
    assert step_s(4096, 0) == pytest.approx(2 * 4.02e9 * 4096 / 494.75e12 + 1.02e-3, rel=0.01)


def test_many_samples_of_a_small_model_wait_for_the_host():
    cost = ModelCost(shape=shape_by_name("0.6B"), rates=H100.rates())
    assert cost.seconds(EngineWork(1, 256)) == pytest.approx(2e-3 + 256 * 8e-6)


# Steps that were counted by hand.


def test_the_step_of_4b_on_eight_h100s_is_the_one_counted_by_hand():
    """By hand: decode 155 s, prefill 6, update and proximal pass 38 to 51, rest 2.5."""
    [found] = published(
        shape_by_name("4B"),
        sizes_of("4B"),
        mean=10425,
        modes=[Mode(1.25, refill=True)],
        **{"learner.offload": "none"},
    )
    assert 155 < found.rollout_s < 180
    assert 36 < found.update_s < 60
    assert 210 < found.step_s < 225 * 1.1


def test_keys_and_values_of_eight_bits_shorten_the_step_of_4b_by_a_quarter():
    plain, half = (
        published(
            shape_by_name("4B"),
            sizes_of("4B"),
            mean=10425,
            modes=[Mode(1.25, refill=True)],
            **{"learner.offload": "none", **preset},
        )[0]
        for preset in ({}, {"+kv_cache": "fp8"})
    )
    assert 0.65 < half.step_s / plain.step_s < 0.75
    assert half.outcome.age_max <= plain.outcome.age_max


@pytest.mark.parametrize(("kind", "least", "most"), [("h100", 2.6, 3.1), ("4090", 8.5, 11)])
def test_the_bounds_of_a_small_model_include_the_step_counted_by_hand(kind, least, most):
    """By hand at 17 to 30 % of the peak; the plan expects 30 %, and 17 as its slow bound."""
    assumed, overrides = Assumptions.of(SMALL)
    models = Models(policy=sizes_of("0.6B"), beside=Beside())
    config = load(*overrides)
    work = work_of(config, assumed, shape=shape_by_name("0.6B"))
    plan = plan_on(Gpus(GPU_KINDS[kind], 1), config, models=models, work=work, assumed=assumed)
    fast, slow = plan.bounds
    assert fast < plan.own.step_s < slow
    assert fast < most
    assert slow > least
    assert slow < 2 * fast


# Published runs. docs/plan.md says which assumptions were made after a row was seen.


@pytest.mark.slow
def test_the_gain_of_verls_partial_rollouts():
    """verl's V1 trainer, docs/advance/v1_async_trainer.md of August 2026: Qwen3.5-35B-A3B on 32
    H100s, 150 steps of 64 × 8 samples with a mean of 12,720 tokens take 22.79 h, 547 s a step, and
    35.4 % less with partial rollouts. Predicted: 38 % less, the step itself 35 % too short, within
    the bounds that the plan gives. A third run trains on 16 of the GPUs while the others sample,
    and takes 14.10 h: the speed of its trainer, which has no reason to wait, predicts both runs.
    """
    config = Qwen3_5MoeTextConfig()
    sizes = model_sizes(config, LoraConfig(), is_fused=True)
    shape = shape_of(sizes, config)
    assert shape.num_multiplied == pytest.approx(2.95e9, rel=0.01)
    settings = {"trainer.num_groups": 64, "trainer.num_minibatches": 4}
    settings |= {"engine.tensor_parallel_size": 4, "rollout.max_response_tokens": 32768}
    settings |= {"learner.max_tokens": 34816}

    def predict(num_gpus: int, *modes: Mode) -> list[StepPrice]:
        chosen = {**settings, "runtime.num_workers": num_gpus}
        return published(shape, sizes, mean=12720, modes=list(modes), **chosen)

    runs = synchronous, refill = predict(32, SYNCHRONOUS, REFILL)
    assert 1 - refill.step_s / synchronous.step_s == pytest.approx(0.354, abs=0.1)
    assert synchronous.step_s == pytest.approx(547, rel=0.45)
    [apart] = predict(16, REFILL)
    slower = (14.10 * 3600 / 150 - apart.rest_s) / apart.update_s
    steps = [run.rollout_s + slower * run.update_s + run.rest_s for run in runs]
    assert steps == pytest.approx([547, 353], rel=0.25)
    assert 1 - steps[1] / steps[0] == pytest.approx(0.354, abs=0.1)


def test_nemos_step_of_30b_a3b_is_predicted_within_a_quarter():
    """NeMo RL v0.6, docs/about/performance-summary.md: 192 s for 64 × 32 samples with a mean of
    3,203 tokens, 4,096 at most, on 32 H100s in 16 engines, and four updates.
    """
    name = "Qwen/Qwen3-30B-A3B"
    settings = {"trainer.num_groups": 64, "trainer.num_minibatches": 4, "runtime.num_workers": 32}
    settings |= {"engine.tensor_parallel_size": 2, "rollout.max_response_tokens": 4096}
    settings |= {"rollout.group_size": 32, "data.max_prompt_tokens": 512}
    [found] = published(
        shape_by_name(name), sizes_of(name), mean=3203, modes=[SYNCHRONOUS], **settings
    )
    assert found.step_s == pytest.approx(192, rel=0.25)


def test_the_h200_sitting_is_predicted_too_short_and_its_schedules_in_proportion():
    """docs/experiments.md, "One GPU": 8 × 8 responses of at most 512 tokens, 0.6 B parameters, take
    11.2 s synchronously and 2.9 s with α = 1.5, slots being in use for 0.27 and 0.90 of the time.
    """
    assumed, overrides = Assumptions.of([*SMALL, "mean_response_tokens=138", "sigma=1"])
    tried = ["trainer.num_groups=8", "rollout.max_response_tokens=512", "engine.cuda_graphs=false"]
    config = load(*overrides, *tried, "rollout.resume=keep", "algorithm.dynamic_sampling=false")
    models, kind = Models(policy=sizes_of("0.6B"), beside=Beside()), GPU_KINDS["h200"]
    memory = real_memory(config, models, gpu_gib=kind.gib)
    work = work_of(config, assumed, shape=shape_by_name("0.6B"))
    modes = [SYNCHRONOUS, Mode(1.5, refill=True)]
    found = step_prices(memory, work, rates=kind.rates(), modes=modes)
    assert [price.step_s for price in found] == pytest.approx([11.2, 2.9], rel=0.3)
    assert [price.outcome.occupancy for price in found] == pytest.approx([0.27, 0.9], abs=0.05)


# The update.


def memory_of(*settings: str) -> RealMemory:
    config = load("+recipe=qwen3_4b_dapo", "learner.activation_checkpointing=false", *settings)
    models = Models(policy=sizes_of("4B"), beside=Beside())
    return real_memory(config, models, gpu_gib=3000)


def test_the_flops_of_an_update():
    """6 FLOPs for each parameter and token, and 2 for half of the tokens before the second of two
    updates; attention 4 for each number of the output and pair, three and a half times.
    """
    shape, rates = shape_by_name("4B"), H100.rates()
    tokens, pairs = 2.67e6, 2.67e6 * 13200 / 2
    trained = TrainedTokens(num_tokens=tokens, num_pairs=pairs)
    attention = 4 * 36 * 32 * 128 * pairs
    flops = (6 + 1) * 4.02e9 * tokens + (3.5 + 0.5) * attention
    found = update_s(shape, trained, memory_of(), rates=rates)
    assert found == pytest.approx(flops / 8 / rates.update_flops_per_s, rel=0.02)
    behaviour = ("algorithm.ratio=behaviour", "algorithm.correction=none")
    once = update_s(shape, trained, memory_of(*behaviour), rates=rates)
    assert once == pytest.approx((found * 6) / 7, rel=0.02)
    again = memory_of("learner.activation_checkpointing=true", "learner.keep_attention=true")
    more = update_s(shape, trained, again, rates=rates)
    assert (more - found) * rates.update_flops_per_s * 8 == pytest.approx(
        2 * 4.02e9 * tokens, rel=0.02
    )
    slow_link = replace(rates, link_bytes_per_s=1e9)
    assert update_s(shape, trained, memory_of(), rates=slow_link) > 5 * found


def test_fewer_tokens_between_two_prompts_are_fewer_pairs():
    trained = TrainedTokens.of([100, 300], prompt_tokens=100, num_samples=10)
    assert trained == TrainedTokens(num_tokens=3000, num_pairs=10 * (200**2 + 400**2) / 2 / 2)


# The command.


@pytest.mark.slow
def test_the_command_prices_each_choice_of_gpus(tmp_path, capsys):
    file = tmp_path / "plan.json"
    gpus = ["gpus=h100:1,2,4090:1,l40s:3", "price.h100=2.5", "price.4090=0.4"]
    page = tmp_path / "plan.html"
    assert main(["plan", *SMALL, *gpus, f"json={file}", f"html={page}"]) == 0
    text = page.read_text()
    assert "mean 300 tokens (mean_response_tokens)" in text
    assert text.count("* α = 1.5") == 4, "the tables of the terminal"
    shown = capsys.readouterr().out
    assert "mean 300 tokens (mean_response_tokens); prompts of 100 tokens" in shown
    assert re.search(r"^\* α = 1.5 .* \$0\.\d\d$", shown, re.MULTILINE)
    assert "engine.sleep=always rollout.resume=reprefill" in shown, "the 4090"
    assert re.search(r"\* 400 steps: [\d.]+ to [\d.]+ hours, \$[\d.]+ to \$[\d.]+, if", shown)
    assert re.search(r"fastest: 2 x H100 SXM, .*\ncheapest: 1 x RTX 4090, \$0", shown)
    one, two, small, three = json.loads(file.read_text())
    assert two["schedules"][0]["hours"] < one["schedules"][0]["hours"]
    assert [row["mode"] for row in one["schedules"]] == ["synchronous", *3 * ["refill"]]
    hours = small["schedules"][0]["hours"]
    assert small["schedules"][0]["money"] == pytest.approx(0.4 * hours)
    assert three["schedules"][0]["money"] is None


@pytest.mark.slow
def test_evaluations_count_if_the_number_of_their_prompts_is_known(capsys, tmp_path):
    """By hand, one of AIME 24 takes 200 s. Fails when those at the ends are not counted."""
    file, asked = tmp_path / "plan.json", ["mean_response_tokens=10425", "evaluation_prompts=30"]
    words = ["plan", "+recipe=qwen3_4b_dapo", "gpus=h100:8", *asked, f"json={file}"]
    assert main([*words, "trainer.num_steps=50"]) == 0
    [found] = json.loads(file.read_text())
    assert 150 < found["evaluation_s"] < 300
    for row in found["schedules"]:
        seconds = 50 * row["step_s"] + 4 * found["evaluation_s"]
        assert row["hours"] == pytest.approx(seconds / 3600)
    assert "* 50 steps and 4 evaluations of" in capsys.readouterr().out
    assert main(["plan", *SMALL, "gpus=h100:1"]) == 0
    assert "evaluations are not counted: give evaluation_prompts" in capsys.readouterr().out


def test_what_does_not_fit_says_what_would_help(capsys):
    assert main(["plan", "+recipe=qwen3_4b_dapo", "gpus=4090:2"]) == 0
    shown = capsys.readouterr().out
    assert "2 x RTX 4090, 23.6 GiB: this run does not fit into memory" in shown
    assert "learner.offload" in shown
    assert (
        main(["plan", "+recipe=qwen3_4b_dapo", "gpus=h100:3", "engine.tensor_parallel_size=2"]) == 0
    )
    assert "engine.tensor_parallel_size" in capsys.readouterr().out


@pytest.mark.slow
def test_a_schedule_that_overflows_the_cache_is_named():
    config, models = load("+recipe=qwen3_4b_dapo"), Models(policy=sizes_of("4B"), beside=Beside())
    assumed = Assumptions()
    work = work_of(config, assumed, shape=shape_by_name("4B"))
    few = plan_on(Gpus(GPU_KINDS["l40s"], 4), config, models=models, work=work, assumed=assumed)
    assert "needs more than the KV cache" in plan_text(few)
    many = plan_on(Gpus(H100, 8), config, models=models, work=work, assumed=assumed)
    assert "needs more than the KV cache" not in plan_text(many)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "gpus=h100:8 is missing: which GPUs?"),
        (["gpus=h100"], "gpus=h100: that is none of 4090, l40s, a100"),
        (["gpus=v100:8"], "gpus=v100:8: v100 is none of 4090"),
        (["gpus=h100:0"], "gpus=h100:0: h100:0 must be KIND:NUMBER"),
        (["gpus=h100:8", "price.h10=2"], "price.h10=2: h10 is none of"),
        (["gpus=h100:8", "price.h100=-2"], "price.h100 must be a number > 0, got -2"),
        (["gpus=h100:8", "sigma=wide"], "sigma must be a number > 0, got wide"),
        (["gpus=h100:8", "tool_s=3"], "have no effect without turns; remove them"),
        (["gpus=h100:8", "turns=1", "tool_s=3"], "have no effect with one turn"),
        (["gpus=h100:8", "lengths=none.jsonl"], "lengths=none.jsonl cannot be read"),
        (["gpus=h100:8", "trainer.num_group=3"], "trainer.num_group"),
        (["--gpus=h100:8"], "gpus"),
    ],
)
def test_a_wrong_argument_is_named(arguments, message, capsys):
    assert main(["plan", "+recipe=qwen3_0_6b_gsm8k", *arguments]) == 1
    assert message in capsys.readouterr().err


# Lengths.

VERL = {"input": "What is 2 + 2?", "output": "four tokens are here", "gts": "4", "score": 1.0}


def test_lengths_of_other_trainers_are_read(tmp_path):
    """verl dumps texts, TRL and others tokens or their number."""
    lines = [VERL, VERL | {"output": "two more"}, VERL | {"input": "another"}]
    (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, lines)))
    other = [{"prompt_id": 3, "completion_ids": [5, 6, 7]}, {"prompt": "a", "response_length": 9}]
    (tmp_path / "2.jsonl").write_text("\n".join(map(json.dumps, other)))
    found = read_lengths(tmp_path, lambda text: len(text.split()))
    assert found == ((4, 2), (4,), (3,), (9,))


def test_recorded_lengths_replace_lognormal_ones(tmp_path, capsys):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"lengths": [[10, 20], [30, 40]]}))
    assert main(["plan", *SMALL, "gpus=h100:1", f"lengths={profile}"]) == 0
    recorded = capsys.readouterr().out
    assert "4 recorded responses" in recorded


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}', r"1.jsonl:1 is not a recorded sample .*none of num_tokens"),
        ('{"prompt": 1, "output": "b"}\nno', r"1.jsonl:2 is not a recorded sample"),
        ("[1]", r"1.jsonl:1 is not a recorded sample"),
        (None, "has no line of a response"),
    ],
)
def test_a_file_without_lengths_is_refused_with_its_line(tmp_path: Path, content, message):
    if content is not None:
        (tmp_path / "1.jsonl").write_text(content)
    with pytest.raises(RecordingError, match=message):
        read_lengths(tmp_path, len)


# A run held to its plan.


def plan_of(run: RunFiles, folder: Path, **changes: float) -> Path:
    """Write a plan that said half of what each part of the run took, and the lengths exactly."""
    took = {k: run.mean(f"time/{k}_s") or 0.0 for k in ("rollout", "update", "step")}
    seconds = {f"{key}_s": value / 2 for key, value in took.items()} | {"rest_s": 1.0}
    schedule = {"over_sampling_factor": run.number("rollout.over_sampling_factor")}
    schedule |= {"refill": run.setting("rollout.refill"), **seconds}
    tokens = run.mean("rollout/response_tokens_mean")
    plan = {"gpu": "H100 SXM", "num_gpus": 1, "mean_response_tokens": tokens}
    path = folder / "plan.json"
    path.write_text(json.dumps([{**plan, "schedules": [schedule]} | changes]))
    return path


def test_a_report_says_which_assumption_of_the_plan_was_off(tmp_path, capsys):
    """Responses of the assumed length took twice as long: the speeds were off, and not lengths."""
    run = read_run(make_run(tmp_path / "run"))
    assert main(["report", str(run.run_dir), "--plan", str(plan_of(run, tmp_path))]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"plan: rollout [\d.]+ s a step, measured [\d.]+ s \(2\.00 times\)", shown)
    assert "for their length, the update took 2.00 times as long as planned" in shown
    assert "were assumed" not in shown
    assert "2.00 times" in (run.run_dir / "report.html").read_text()
    tokens = run.mean("rollout/response_tokens_mean") or 0.0
    shorter = plan_of(run, tmp_path, mean_response_tokens=tokens / 2)
    assert main(["report", str(run.run_dir), "--plan", str(shorter)]) == 0
    shown = capsys.readouterr().out
    assert f"where {tokens / 2:,.0f} were assumed (2.00 times)" in shown
    assert "for their length" not in shown


def test_a_comparison_holds_each_variant_to_the_plan(tmp_path, capsys):
    """The plan said half of each run's time, so that its gains are the measured ones."""
    runs = [make_run(tmp_path / str(n), factor=float(n), num_steps=12) for n in (1, 2)]
    plans = [json.loads(plan_of(read_run(each), tmp_path).read_text())[0] for each in runs]
    schedules = [plan["schedules"][0] for plan in plans]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([{**plans[0], "schedules": schedules}]))
    page = tmp_path / "compared.html"
    assert main(["compare", *map(str, runs), "--plan", str(path), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    found = re.search(
        r"plan: α = 2: .*; gain over synchronous: ([\d.]+) planned, (.*) measured", shown
    )
    assert found is not None
    assert found[1] == found[2]
    assert found[0] in page.read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_gpus": 2}, "has none"), ({"schedules": [{}]}, "is not what plan json=FILE writes")],
)
def test_a_plan_of_another_run_is_refused(tmp_path, capsys, changes, message):
    run = read_run(make_run(tmp_path / "run"))
    path = plan_of(run, tmp_path, **changes)
    assert main(["report", str(run.run_dir), "--plan", str(path)]) == 1
    assert message in capsys.readouterr().err
