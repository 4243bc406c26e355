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


class Ratio(Enum):
    """What the clipped ratio is taken against; the other off-policy settings follow from it."""

    proximal = "proximal"  # decoupled: the learner at the start of the step; tis_cap does the rest
    behaviour = "behaviour"  # bypass: the engine's own log-probabilities; tis_cap must be null


class Schedule(Enum):
    """How the learning rate goes on after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Offload(Enum):
    """What of the learner leaves the accelerator while the engine generates."""

    none = "none"
    optimizer = "optimizer"
    all = "all"


class Template(Enum):
    """How a prompt column becomes the text the model sees."""

    chat = "chat"  # the tokenizer's chat template around one user message (or a list of messages)
    plain = "plain"  # data.plain_template with {prompt} replaced


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
