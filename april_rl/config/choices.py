"""The settings that are one of a few words; Hydra takes the member's name."""

from __future__ import annotations

from enum import Enum


class OnStale(Enum):
    """What happens to a group that would pass `rollout.max_staleness`."""

    finish = "finish"  # the step waits for it
    mask = "mask"  # its tokens beyond the cap get no gradient


class Resume(Enum):
    """How a parked sample goes on in the next step."""

    keep = "keep"  # with the KV cache the older policies computed, where the engine still has it
    reprefill = "reprefill"  # prompt and response so far are computed again by the new policy


class Advantage(Enum):
    """How rewards become advantages."""

    grpo = "grpo"  # (reward - group mean) / group standard deviation
    dr_grpo = "dr_grpo"  # reward - group mean
    rloo = "rloo"  # reward - mean of the others of the group
    reinforce_pp = "reinforce_pp"  # (reward - batch mean) / batch standard deviation
    reinforce_pp_baseline = "reinforce_pp_baseline"  # dr_grpo / its standard deviation in the batch


class Loss(Enum):
    """What is minimised; formulas and sources stand in april_rl/algorithm/losses.py."""

    ppo_clip = "ppo_clip"  # the clipped surrogate
    gspo = "gspo"  # the same with the ratio of the whole response
    gspo_token = "gspo_token"  # gspo whose tokens answer for themselves
    cispo = "cispo"  # the weight is clipped, not the update
    sapo = "sapo"  # a soft gate for the clip
    policy_gradient = "policy_gradient"  # neither ratio nor clip


# The settings of `algorithm` that bound the ratio of a loss. One that a loss does not read is
# refused with it, unless it has its default.
LOSS_SETTINGS: dict[Loss, tuple[str, ...]] = {
    Loss.ppo_clip: ("clip_low", "clip_high", "dual_clip"),
    Loss.gspo: ("clip_low", "clip_high"),
    Loss.gspo_token: ("clip_low", "clip_high"),
    Loss.cispo: ("clip_low", "clip_high"),
    Loss.sapo: ("sapo_positive_temperature", "sapo_negative_temperature"),
    Loss.policy_gradient: (),
}


class Aggregation(Enum):
    """What a token counts in the loss of a batch."""

    token_mean = "token_mean"  # every token the same
    sequence_mean = "sequence_mean"  # every response the same
    constant_length = "constant_length"  # every token 1 / rollout.max_response_tokens of a response


class Kl(Enum):
    """Schulman's estimators of a KL divergence."""

    none = "none"
    k2 = "k2"  # its gradient is that of KL(policy, reference)
    k3 = "k3"  # GRPO's; its gradient is that of KL(reference, policy)


class Correction(Enum):
    """What a token counts for being sampled by the engine, perhaps with older weights."""

    none = "none"  # the same as any other
    truncate = "truncate"  # its importance weight, at most tis_cap
    mask = "mask"  # its importance weight, 0 outside mask_low and mask_high
    sequence_truncate = "sequence_truncate"  # that of its whole response, at most tis_cap


# The settings of `algorithm` that a correction reads; others are refused as those of a loss are.
CORRECTION_SETTINGS: dict[Correction, tuple[str, ...]] = {
    Correction.none: (),
    Correction.truncate: ("tis_cap",),
    Correction.mask: ("mask_low", "mask_high"),
    Correction.sequence_truncate: ("tis_cap",),
}


class Ratio(Enum):
    """What the ratio of a loss is taken against; the other off-policy settings follow from it."""

    proximal = "proximal"  # decoupled: the learner at the start of the step; correction: the rest
    behaviour = "behaviour"  # bypass: the engine's own; correction only with policy_gradient


class Schedule(Enum):
    """How the learning rate goes on after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Offload(Enum):
    """What of the learner leaves the accelerator while the engine generates."""

    none = "none"
    optimizer = "optimizer"  # its moments, 8 bytes a parameter, also but for optimizer steps
    all = "all"  # the float32 masters too: 12 bytes a parameter


class Template(Enum):
    """How a prompt column becomes the text the model sees."""

    chat = "chat"  # the tokenizer's chat template around one user message (or a list of messages)
    plain = "plain"  # data.plain_template with {prompt} replaced


class Extract(Enum):
    """Where the answer of a response is read, after the end of its thinking (`</think>`)."""

    auto = "auto"  # boxed or answer_line, whichever comes last in the response
    boxed = "boxed"  # the last \\boxed{...}
    answer_line = "answer_line"  # the last line that begins with `Answer:`
    last_number = "last_number"  # the last number


class TrackingBackend(Enum):
    """Where metrics go beside metrics.jsonl."""

    wandb = "wandb"
    trackio = "trackio"
    tensorboard = "tensorboard"


class WandbMode(Enum):
    """Weights & Biases."""

    online = "online"
    offline = "offline"
    disabled = "disabled"


class Device(Enum):
    """What a worker computes on."""

    auto = "auto"  # a GPU where there is one
    cpu = "cpu"
    gpu = "gpu"


class ComputeDtype(Enum):
    """The precision of the learner's forward and backward pass; masters and optimizer are float32
    always.
    """

    bfloat16 = "bfloat16"
    float32 = "float32"


class KvCacheDtype(Enum):
    """The precision of the engine's keys and values."""

    auto = "auto"  # that of its weights
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m2 = "fp8_e5m2"


class Sleep(Enum):
    """Whether engines on GPUs give up their weights and KV cache while the learner updates."""

    auto = "auto"  # they do unless the memory plan has room for both, and a tenth of the GPU left
    always = "always"  # the learner has the whole GPU; parked samples lose their KV cache
    never = "never"  # the learner updates beside the engine's share, engine.gpu_memory_utilization


class Speculation(Enum):
    """How the engine guesses tokens ahead. A draft model is no choice: it would have to follow the
    policy, and no weight sync reaches it (docs/design.md says what that would take).
    """

    none = "none"
    ngram = "ngram"  # what followed the last few tokens where they stood before in the sample
