"""Every setting of a run: its default, its unit and its check.

The description of a setting is the comment behind or above it. `slots=True` is required: it makes
an unknown key an error. Checks that involve several sections are in `april_rl.config.consistency`;
checks that need files, the model or the machine are in `april_rl.runtime.preflight`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.checkpoint import CheckpointConfig
from april_rl.config.checks import above, at_least, require
from april_rl.config.choices import (
    ComputeDtype,
    Offload,
    OnStale,
    Resume,
    Schedule,
)
from april_rl.config.consistency import check_consistency
from april_rl.config.engine import EngineConfig
from april_rl.config.lora import LoraConfig
from april_rl.config.profiler import ProfilerConfig
from april_rl.config.rehearsal import RehearsalConfig
from april_rl.config.runtime import RuntimeConfig
from april_rl.config.task import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RewardConfig,
)
from april_rl.config.tracking import TrackingConfig

_FUNCTION = re.compile(r"[\w.]+:\w+")


@dataclass(slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up, a learning-rate schedule and gradient clipping."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01  # for matrices; norms and biases do not decay
    max_grad_norm: float = 1.0
    # optimizer steps (trainer.num_minibatches a step) of a linear rise from lr / warmup_steps
    warmup_steps: int = 0
    schedule: Schedule = Schedule.constant  # over trainer.num_steps, after the warm-up

    def __post_init__(self) -> None:
        above("optimizer", 0, lr=self.lr, eps=self.eps, max_grad_norm=self.max_grad_norm)
        at_least("optimizer", 0, weight_decay=self.weight_decay, warmup_steps=self.warmup_steps)
        for key, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= value < 1, f"optimizer.{key} must be in [0, 1), got {value}")


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    """The outer loop."""

    num_steps: int = 100
    num_groups: int = 32  # N, groups trained in a step
    num_minibatches: int = 1  # optimizer steps for each batch
    # hours after which the run writes a checkpoint and ends, counted from each start; 0: no limit
    max_hours: float = 0.0
    # steps in a row whose loss or gradient is not finite: they are skipped, the last ends the run
    max_bad_steps: int = 3

    def __post_init__(self) -> None:
        at_least(
            "trainer",
            1,
            num_steps=self.num_steps,
            num_groups=self.num_groups,
            num_minibatches=self.num_minibatches,
            max_bad_steps=self.max_bad_steps,
        )
        at_least("trainer", 0, max_hours=self.max_hours)
        require(
            self.num_minibatches <= self.num_groups,
            f"trainer.num_minibatches must be <= trainer.num_groups ({self.num_groups}), "
            f"got {self.num_minibatches}",
        )


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    """Partial rollouts with over-sampling."""

    group_size: int = 8  # G, samples of one prompt
    # α: samples in flight ÷ samples that a step needs; auto: learned during the run
    over_sampling_factor: int | float | str = 1.5
    max_off_policy_frac: float = 1.0  # share of trained tokens; limits over_sampling_factor=auto
    refill: bool = True  # fill a finished sample's slot at once; false: one-shot over-provisioning
    max_staleness: int = 5  # policy versions between a token's sampling and its training
    on_stale: OnStale = OnStale.finish
    resume: Resume = Resume.auto  # how a parked sample continues
    max_response_tokens: int = 16384
    temperature: float = 1.0
    drain_steps: int = 0  # number of last steps that open no new prompts
    # engine steps between two decisions of the controller; auto: 8, more above 64 engines
    tick_steps: int | str = "auto"
    abort_timeout_s: float = (
        60.0  # an engine that has not returned its samples by then counts as hung
    )
    max_rejected_groups: int = (
        0  # groups without signal after which a step ends with an error; 0: 20 · num_groups
    )

    def __post_init__(self) -> None:
        at_least(
            "rollout",
            1,
            group_size=self.group_size,
            max_response_tokens=self.max_response_tokens,
        )
        at_least(
            "rollout",
            0,
            max_staleness=self.max_staleness,
            drain_steps=self.drain_steps,
            max_rejected_groups=self.max_rejected_groups,
        )
        above("rollout", 0, temperature=self.temperature, abort_timeout_s=self.abort_timeout_s)
        require(
            self.tick_steps == "auto"
            or (not isinstance(self.tick_steps, str) and self.tick_steps >= 1),
            f"rollout.tick_steps must be >= 1 or auto, got {self.tick_steps}",
        )
        self._check_factor()

    def _check_factor(self) -> None:
        factor, off_policy = self.over_sampling_factor, self.max_off_policy_frac
        require(
            factor == "auto" or (not isinstance(factor, str) and 1 <= factor < math.inf),
            f"rollout.over_sampling_factor must be >= 1 or auto, got {factor}",
        )
        require(
            0 < off_policy <= 1, f"rollout.max_off_policy_frac must be in (0, 1], got {off_policy}"
        )
        require(
            off_policy == 1 or factor == "auto",
            f"rollout.max_off_policy_frac={off_policy:g} has no effect with "
            f"rollout.over_sampling_factor={factor}; it needs auto",
        )


@dataclass(slots=True, kw_only=True)
class LearnerConfig:
    """The training side: FSDP2."""

    max_tokens: int = 32768  # tokens of one packed micro-batch
    age_decay: float = 1.0  # multiplies a token's loss by age_decay ** age; 1: off
    # module:function that maps an age in steps to a token's loss weight; null: age_decay
    age_weight: str | None = None
    # nats; the run warns if the mean |logprob - behaviour_logprob| of age-0 tokens is above it, and
    # ends if it is above 5 times it
    max_mismatch: float = 0.05
    compute_dtype: ComputeDtype = ComputeDtype.auto
    activation_checkpointing: bool = False
    # consecutive workers that share one copy of weights, gradients and optimizer state;
    # runtime.num_workers is a multiple of it (hybrid sharding); 0: all workers
    shard_size: int = 0
    # on GPU; a checkpoint reads what has been moved to the host
    offload: Offload = Offload.none

    def __post_init__(self) -> None:
        at_least("learner", 1, max_tokens=self.max_tokens)
        at_least("learner", 0, shard_size=self.shard_size)
        require(
            0 < self.age_decay <= 1, f"learner.age_decay must be in (0, 1], got {self.age_decay}"
        )
        require(
            self.age_weight is None or _FUNCTION.fullmatch(self.age_weight) is not None,
            f"learner.age_weight must be null or module:function, got {self.age_weight}",
        )
        require(
            self.age_weight is None or self.age_decay == 1,
            f"learner.age_decay={self.age_decay:g} has no effect with learner.age_weight="
            f"{self.age_weight}; remove one of them",
        )
        above("learner", 0, max_mismatch=self.max_mismatch)


@dataclass(slots=True, kw_only=True)
class TrainConfig:
    """A whole run.

    With `deterministic`, equal settings and an equal seed give equal samples, metrics and weights,
    on CPU to the last bit, unless a reward times out. It costs the time by which the slowest
    engine, or the score of a sample that has just finished, exceeds a tick (`rollout.tick_steps`
    engine steps); the next tick is already running during that wait.
    """

    name: str = "run"
    seed: int = 0  # in [0, 2**32)
    # a checkpoint to go on from, or a run directory, whose last checkpoint is meant; auto: the run
    # in hydra.run.dir or, if that is not given, the newest unfinished run of this name; null, or
    # auto without one: a new run
    resume: str | None = None
    deterministic: bool = False  # wait for engines and scores at every tick, in a fixed order
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    rehearsal: RehearsalConfig = field(default_factory=RehearsalConfig)

    def __post_init__(self) -> None:
        require(self.resume != "", "resume must be auto, a path or null, got nothing")
        check_consistency(self)
