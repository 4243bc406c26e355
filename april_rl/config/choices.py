"""Settings that take one of a few words; Hydra expects the member's name."""

from __future__ import annotations

from enum import Enum, StrEnum


class OnStale(Enum):
    """Treatment of a group that would exceed `rollout.max_staleness`."""

    finish = "finish"  # the step waits for it
    mask = "mask"  # its tokens beyond the cap get no gradient


class LoraSync(Enum):
    """Tensors that a weight sync sends for a model with adapters."""

    merged = "merged"  # W + (alpha / rank) · B · A, rounded to engine.dtype
    adapter = "adapter"  # A and B alone, for vLLM's own LoRA layers


class Resume(Enum):
    """Ways in which a parked sample continues in the next step."""

    auto = "auto"  # keep if engines stay awake (always on a CPU), otherwise reprefill
    keep = "keep"  # with the KV cache that older policies computed, if the engine still has it
    reprefill = "reprefill"  # prompt and response so far are computed again by the new policy

    @property
    def keeps_caches(self) -> bool:
        """Return whether parked samples keep their KV cache; auto has to be decided before."""
        assert self is not Resume.auto, "rollout.resume=auto has not been decided"
        return self is Resume.keep


class OnRestart(Enum):
    """Treatment of unfinished episodes when their process ends or the run is resumed."""

    replay = "replay"  # build it again: `reset`, and `step` for every turn it had
    again = "again"  # in a resumed run its group starts again from the prompt, else it is dropped


class Advantage(StrEnum):
    """Formulas that turn rewards into advantages."""

    grpo = "grpo"  # (reward - group mean) / group standard deviation
    dr_grpo = "dr_grpo"  # reward - group mean
    rloo = "rloo"  # reward - mean of the others of the group
    reinforce_pp = "reinforce_pp"  # (reward - mean) / standard deviation over the batch's tokens
    reinforce_pp_baseline = "reinforce_pp_baseline"  # dr_grpo, then reinforce_pp
    gdpo = "gdpo"  # grpo for each of reward.functions, their sum by weight, scaled over the batch
    grpo_by_turn = "grpo_by_turn"  # grpo over rewards of turns, summed from a token's turn on
    gae = "gae"  # PPO: from the values of a critic, for each token (critic.*)
    none = "none"  # always 0: rewards are logged but not trained; for use with teacher.path


# Formulas that do not compare the samples of a group, so they learn from equal rewards too.
SAMPLE_BY_SAMPLE = (Advantage.reinforce_pp, Advantage.gae, Advantage.none)


class Loss(StrEnum):
    """The policy loss; april_rl/training/algorithm/losses.py has formulas and sources."""

    ppo_clip = "ppo_clip"  # the clipped surrogate
    gspo = "gspo"  # the same with one ratio for a whole response
    cispo = "cispo"  # the weight is clipped, not the update
    sapo = "sapo"  # a soft gate in place of the clip
    dppo_tv = "dppo_tv"  # no clip: a mask by the change of the token's probability
    dppo_kl = "dppo_kl"  # the same by the KL divergence of this token against all others
    policy_gradient = "policy_gradient"  # neither ratio nor clip


# The settings of `algorithm` that bound the step of a loss. A setting that the chosen loss does
# not read must have its default.
LOSS_SETTINGS: dict[str, tuple[str, ...]] = {
    Loss.ppo_clip: ("clip_low", "clip_high", "dual_clip"),
    Loss.gspo: ("clip_low", "clip_high"),
    Loss.cispo: ("clip_low", "clip_high"),
    Loss.sapo: (),
    Loss.dppo_tv: ("clip_low", "clip_high"),
    Loss.dppo_kl: ("clip_low", "clip_high"),
    Loss.policy_gradient: (),
}


class Aggregation(Enum):
    """Ways to average the losses of a batch's tokens."""

    token_mean = "token_mean"  # every token counts the same
    sequence_mean = "sequence_mean"  # every response counts the same
    constant_length = "constant_length"  # a token counts 1 / rollout.max_response_tokens


class Kl(Enum):
    """Schulman's estimators of a KL divergence."""

    none = "none"
    k1 = "k1"  # in the reward: its sum over the rest of a response is subtracted from advantages
    k2 = "k2"  # its gradient is the gradient of KL(policy, reference)
    k3 = "k3"  # GRPO's; its gradient is the gradient of KL(reference, policy)


class Correction(Enum):
    """The weight of a token that the engine sampled, perhaps with older weights."""

    none = "none"  # always 1
    truncate = "truncate"  # the token's importance weight, at most weight_bounds[1]
    mask = "mask"  # the token's importance weight, or 0 outside weight_bounds
    sequence_truncate = "sequence_truncate"  # the response's weight, at most weight_bounds[1]

    @property
    def usual_bounds(self) -> list[float]:
        return [0.5, 5.0] if self is Correction.mask else [0.0, 2.0]


class Ratio(Enum):
    """The denominator of the loss's ratio; the other off-policy settings depend on it."""

    proximal = "proximal"  # decoupled mode: the learner at the start of the step, with a correction
    behaviour = "behaviour"  # bypass mode: the engine; a correction only with policy_gradient


class Schedule(Enum):
    """Courses of the learning rate after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Offload(Enum):
    """Part of the learner that moves to host memory while the engine generates."""

    none = "none"
    optimizer = "optimizer"  # optimizer state, 8 bytes a parameter; a step loads it layer by layer
    all = "all"  # float32 master weights too: 12 bytes a parameter


class RouterReplay(Enum):
    """Forward passes whose experts an update repeats, in a mixture of experts."""

    none = "none"  # every pass chooses its own experts
    learner = "learner"  # the pass that computed the proximal log-probabilities
    engine = "engine"  # the passes of the engine that sampled the tokens

    @property
    def is_on(self) -> bool:
        return self is not RouterReplay.none


class Extract(Enum):
    """Part of a response that holds the answer; text before the end of thinking (`</think>`) is
    skipped.
    """

    auto = "auto"  # boxed or answer_line, whichever comes last in the response
    boxed = "boxed"  # the last \\boxed{...}
    answer_line = "answer_line"  # what follows the last `Answer:`
    last_number = "last_number"  # the last number


class TrackingBackend(Enum):
    """Trackers that get the metrics in addition to metrics.jsonl."""

    wandb = "wandb"
    trackio = "trackio"
    tensorboard = "tensorboard"


class WandbMode(Enum):
    """Modes of Weights & Biases."""

    online = "online"
    offline = "offline"
    disabled = "disabled"


class Device(Enum):
    """The device that workers compute on."""

    auto = "auto"  # a GPU if there is one
    cpu = "cpu"
    gpu = "gpu"


class ComputeDtype(Enum):
    """The precision of the engine, or of the learner's forward and backward pass; master weights
    and optimizer state are always float32.
    """

    auto = "auto"  # bfloat16 on a GPU, float32 on a CPU
    bfloat16 = "bfloat16"
    float32 = "float32"


class KvCacheDtype(Enum):
    """The precision of the engine's keys and values."""

    auto = "auto"  # the precision of the engine's weights
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m2 = "fp8_e5m2"


class Sleep(Enum):
    """Times at which engines on GPUs release weights and KV cache for the learner's update."""

    auto = "auto"  # always, unless both fit with a tenth of the GPU to spare
    always = "always"  # the learner has the whole GPU; parked samples lose their KV cache
    never = "never"  # the learner updates beside the engine's share, engine.gpu_memory_utilization
