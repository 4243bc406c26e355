"""Notes at the start of a run about settings that are allowed but have no effect or do harm.

They are not refused as other ignored settings are, because a recipe is tried with other devices and
other values than its own, which would each need a second override.
"""

from __future__ import annotations

from collections.abc import Iterator

from april_rl.config.choices import LOSS_SETTINGS, Advantage, Offload, Ratio, RouterReplay, Sleep
from april_rl.config.engine import EngineConfig
from april_rl.config.schema import TrainConfig
from april_rl.start.planning.memory_plan import CHECKPOINT_BYTES

_DISK_BYTES_PER_S = 2e9  # speed of a disk that all nodes share; an assumption
_STOP_FACTOR = 1.5  # leaves time for the copy before it and for the rest of the stop


def inert_settings(config: TrainConfig, *, device: str) -> Iterator[str]:
    """Yield a line for each setting that another one or the device leaves without effect."""
    algorithm = config.algorithm
    bounds = LOSS_SETTINGS.get(algorithm.loss, ())
    is_one_update = config.trainer.num_minibatches * config.trainer.num_passes == 1
    if algorithm.ratio is Ratio.proximal and is_one_update and bounds:
        *most, last = [f"algorithm.{key}" for key in bounds]
        keys = " and ".join([", ".join(most), last]) if most else last
        yield f"with trainer.num_minibatches=1 every ratio is 1: {keys} never act"
    has_critic = algorithm.advantage == Advantage.gae
    if has_critic and is_one_update and config.critic.value_clip is not None:
        yield "with trainer.num_minibatches=1 critic.value_clip never acts"
    replay, has_proximal = config.learner.router_replay, algorithm.ratio is Ratio.proximal
    if replay is RouterReplay.learner and (is_one_update or not has_proximal):
        cause = "trainer.num_minibatches=1" if is_one_update else "algorithm.ratio=behaviour"
        yield (
            f"learner.router_replay={replay.value} has no effect with {cause}, where no pass "
            "computes proximal log-probabilities beforehand; remove it"
        )
    learner = config.learner
    if learner.keep_attention is True and not learner.activation_checkpointing:
        yield (
            "learner.keep_attention=true has no effect with "
            "learner.activation_checkpointing=false, where layers keep all that they compute; "
            "remove it"
        )
    if device == "cpu":
        yield from _ignored_settings_on_cpu(config)
    elif (cache_gib := config.engine.kv_cache_gib) != EngineConfig().kv_cache_gib:
        yield (
            f"engine.kv_cache_gib={cache_gib:g} has no effect on a GPU, where the KV cache gets "
            "what engine.gpu_memory_utilization leaves after the weights; remove it"
        )


def _ignored_settings_on_cpu(config: TrainConfig) -> Iterator[str]:
    engine, offload = config.engine, config.learner.offload
    if config.learner.flash_attention_4:
        yield "learner.flash_attention_4=true has no effect on CPU; remove it"
    if engine.sleep is Sleep.always:
        yield "engine.sleep=always has no effect on CPU, where no engine sleeps; remove it"
    if engine.gpu_memory_utilization != EngineConfig().gpu_memory_utilization:
        yield (
            f"engine.gpu_memory_utilization={engine.gpu_memory_utilization} has no effect on "
            "CPU, where engine.kv_cache_gib is the size of the KV cache; remove it"
        )
    if offload is not Offload.none:
        yield (
            f"learner.offload={offload.value} has no effect on CPU, where the learner is "
            "already in host memory; remove it"
        )


def short_stop_deadline(config: TrainConfig, num_trained: int) -> Iterator[str]:
    """Yield a warning when checkpoint.stop_deadline_s is too short to write a checkpoint."""
    num_bytes, deadline_s = CHECKPOINT_BYTES * num_trained, config.checkpoint.stop_deadline_s
    takes_s = num_bytes / _DISK_BYTES_PER_S
    if takes_s > deadline_s:
        yield (
            f"warning: checkpoint.stop_deadline_s={deadline_s:g} is too short: a checkpoint has "
            f"{num_bytes / 1e9:,.0f} GB, which takes {takes_s:,.0f} s at 2 GB/s, and a run that is "
            "stopped and cannot write it in time loses its last steps. Set at least "
            f"{_STOP_FACTOR * takes_s:,.0f}"
        )
