"""Messages at the start about settings without effect."""

from dataclasses import fields

import pytest
from composed_config import load
from planned_models import sizes_of

from april_rl.config.engine import EngineConfig
from april_rl.config.schema import LearnerConfig, RuntimeConfig
from april_rl.start.planning.notes import inert_settings, short_stop_deadline


def notes(*overrides: str, device: str = "cpu") -> list[str]:
    return list(inert_settings(load("+recipe=tiny_cpu", *overrides), device=device))


CRITIC = ["algorithm.advantage=gae", "critic.value_clip=0.2"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algorithm=dapo"], "algorithm.clip_high and algorithm.dual_clip never act"),
        (["algorithm=gspo"], "algorithm.clip_low and algorithm.clip_high never act"),
        (["algorithm=cispo"], "clip_high never act"),
        ([*CRITIC, "algorithm.loss=policy_gradient"], "critic.value_clip never acts"),
    ],
)
def test_with_one_update_per_batch_the_start_says_that_clipping_has_no_effect(
    overrides: list[str], named: str
) -> None:
    (line,) = notes(*overrides)
    assert named in line
    assert "trainer.num_minibatches=1" in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.num_minibatches=2"],
        ["trainer.num_passes=2", "learner.router_replay=learner"],
        ["algorithm.ratio=behaviour", "algorithm.correction=none"],
        ["algorithm.loss=policy_gradient"],
    ],
)
def test_no_such_message_appears_when_ratios_differ_from_one_or_are_unused(
    overrides: list[str],
) -> None:
    assert notes(*overrides) == []


def test_keeping_attention_without_recomputation_is_reported_at_the_start() -> None:
    kept = ("trainer.num_minibatches=2", "learner.keep_attention=true")
    (line,) = notes(*kept)
    assert line.startswith("learner.keep_attention=true has no effect with learner.activation_ch")
    assert notes(*kept, "learner.activation_checkpointing=0.5") == []


def test_the_overlong_penalty_of_dapo_is_at_most_half_of_the_reward_span() -> None:
    """DAPO subtracts up to 1 from rewards of -1 and 1, in the last 4,096 of 20,480 tokens."""
    algorithm = load("+recipe=tiny_cpu", "algorithm=dapo").algorithm
    assert (algorithm.overlong_buffer_frac, algorithm.overlong_penalty) == (4096 / 20480, 0.5)


def test_the_overlong_buffer_of_qwen3_4b_dapo_begins_at_16384_tokens() -> None:
    config = load("+recipe=qwen3_4b_dapo")
    before = 1 - config.algorithm.overlong_buffer_frac
    assert before * config.rollout.max_response_tokens == 16384
    assert list(inert_settings(config, device="cuda")) == []


# Keys of the sections that depend on the device: what one device ignores, and what both read.
# engine.cuda_graphs=false is the normal case on a CPU, so it is not reported.
IGNORED_ON_CPU = {"engine.sleep", "engine.gpu_memory_utilization", "learner.offload"}
IGNORED_ON_CPU |= {"learner.flash_attention_4"}
IGNORED_ON_GPU = {"engine.kv_cache_gib"}
READ_ON_BOTH = {
    *("engine.dtype", "engine.max_model_len", "engine.max_num_seqs", "engine.args"),
    *("engine.tensor_parallel_size", "engine.cuda_graphs", "engine.prefix_caching"),
    *("engine.kv_cache_dtype", "learner.compute_dtype"),
    *("learner.max_tokens", "learner.age_decay", "learner.age_weight", "learner.max_mismatch"),
    *("learner.activation_checkpointing", "learner.keep_attention", "learner.shard_size"),
    *("learner.router_replay", "learner.fused", "runtime.device"),
    *("runtime.num_workers", "runtime.ray_address", "runtime.stall_timeout_s"),
    *("runtime.ray", "runtime.max_restarts", "runtime.threads"),
}


def test_every_setting_is_listed_with_the_devices_that_read_it() -> None:
    """A new setting has to be added to the list so that the start can name ignored settings."""
    sections = (EngineConfig, LearnerConfig, RuntimeConfig)
    names = (section.__name__.removesuffix("Config").lower() for section in sections)
    keys = {f"{n}.{f.name}" for n, s in zip(names, sections, strict=True) for f in fields(s)}
    assert keys == IGNORED_ON_CPU | IGNORED_ON_GPU | READ_ON_BOTH


@pytest.mark.parametrize(
    ("override", "ignoring", "why"),
    [
        ("engine.sleep=always", "cpu", "no effect on CPU, where no engine sleeps; remove it"),
        ("engine.gpu_memory_utilization=0.3", "cpu", "where engine.kv_cache_gib is the size"),
        ("engine.gpu_memory_utilization=auto", "cpu", "where engine.kv_cache_gib is the size"),
        ("learner.offload=optimizer", "cpu", "the learner is already in host memory"),
        ("learner.flash_attention_4=true", "cpu", "no effect on CPU"),
        ("engine.kv_cache_gib=2", "cuda", "what engine.gpu_memory_utilization leaves"),
    ],
)
def test_a_setting_that_the_device_ignores_is_named_at_the_start(
    override: str, ignoring: str, why: str
) -> None:
    for device in ("cpu", "cuda"):
        lines = notes(override, "trainer.num_minibatches=2", device=device)
        assert len(lines) == (device == ignoring), device
        assert all(line.startswith(f"{override} has no effect") and why in line for line in lines)


def test_engine_sleep_never_on_cpu_needs_no_message() -> None:
    assert notes("engine.sleep=never", "trainer.num_minibatches=2") == []


@pytest.mark.parametrize("cause", ["trainer.num_minibatches=1", "algorithm.ratio=behaviour"])
def test_router_replay_without_a_proximal_pass_is_reported_at_the_start(cause: str) -> None:
    both = ("learner.router_replay=learner", "trainer.num_minibatches=2")
    assert notes(*both) == []
    overrides = {one.partition("=")[0]: one for one in (*both, cause)}
    if cause == "algorithm.ratio=behaviour":
        overrides["algorithm.correction"] = "algorithm.correction=none"
    found = [line for line in notes(*overrides.values()) if line.startswith(both[0])]
    assert len(found) == 1
    assert f"has no effect with {cause}" in found[0]
    always = {**overrides, both[0].partition("=")[0]: "learner.router_replay=engine"}
    assert not [line for line in notes(*always.values()) if "router_replay" in line]


@pytest.mark.parametrize(
    ("model", "rank", "deadline_s", "is_short"),
    [
        ("32B", None, 120, True),
        ("32B", None, 300, False),
        ("32B", 16, 120, False),
        ("8B", None, 120, False),
    ],
)
def test_a_deadline_too_short_for_any_checkpoint_is_reported_at_the_start(
    model: str, rank: int | None, deadline_s: int, is_short: bool
) -> None:
    """12 bytes per trained parameter at 2 GB/s: 32.8 billion parameters take 197 s."""
    config = load("+recipe=tiny_cpu", f"checkpoint.stop_deadline_s={deadline_s}")
    lines = list(short_stop_deadline(config, sizes_of(model, rank=rank).num_trained))
    assert len(lines) == is_short
    for line in lines:
        assert "checkpoint.stop_deadline_s=120 is too short: a checkpoint has 393 GB" in line
        assert "197 s at 2 GB/s" in line
        assert line.endswith("Set at least 295")
