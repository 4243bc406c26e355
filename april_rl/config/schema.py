"""Every setting of a run: its default, its unit and its check.

The description of a setting is the comment behind or above it. `slots=True` is required: it makes
an unknown key an error. Checks that involve several sections are in `april_rl.config.consistency`
and run in `to_config`; checks that need files, the model or the machine are in
`april_rl.start.planning.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.checks import check_bounds, require, require_function, within
from april_rl.config.choices import (
    ComputeDtype,
    Offload,
    OnStale,
    Resume,
    RouterReplay,
    Schedule,
    TrackingBackend,
    WandbMode,
)
from april_rl.config.engine import EngineConfig
from april_rl.config.environment import EnvironmentConfig
from april_rl.config.lora import LoraConfig
from april_rl.config.models_beside import CriticConfig, TeacherConfig
from april_rl.config.runtime import RuntimeConfig, UserCodeConfig
from april_rl.config.task import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RewardConfig,
)


@dataclass(slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up, a learning-rate schedule and gradient clipping."""

    lr: float = within("> 0", 1e-6)  # highest learning rate, after the warm-up
    # decay of the running mean of gradients, and of their squares
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = within(">= 0", 0.01)  # decay of matrices; norms and biases do not decay
    max_grad_norm: float = within("> 0", 1.0)  # a gradient with a larger norm is scaled down to it
    # optimizer steps (trainer.num_minibatches · trainer.num_passes a step) of a linear rise from
    # lr / warmup_steps
    warmup_steps: int = within(">= 0", 0)
    schedule: Schedule = Schedule.constant  # course of lr after the warm-up

    def __post_init__(self) -> None:
        check_bounds("optimizer", self)
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"optimizer.betas must be two numbers in [0, 1), got {self.betas}",
        )


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    """The outer loop."""

    num_steps: int = within(">= 1", 100)  # policy versions that the run trains
    num_groups: int = within(">= 1", 32)  # N, groups trained in a step
    num_minibatches: int = within(">= 1", 1)  # optimizer steps of a pass over a batch
    # passes over each batch, GRPO's μ; ratios compare with the policy before the first pass
    num_passes: int = within(">= 1", 1)
    # hours after which the run writes a checkpoint and ends, counted from each start
    max_hours: float | None = within("> 0", None)
    # newest steps whose groups are kept in RUN/recorded, so that `python -m april_rl replay` can
    # train them again; all: every step
    record_steps: int | str = within(">= 0 or all", 0)

    def __post_init__(self) -> None:
        check_bounds("trainer", self)
        require(
            self.num_minibatches <= self.num_groups,
            f"trainer.num_minibatches must be <= trainer.num_groups ({self.num_groups}), "
            f"got {self.num_minibatches}",
        )

    @property
    def optimizer_steps_per_step(self) -> int:
        return self.num_minibatches * self.num_passes

    @property
    def num_optimizer_steps(self) -> int:
        return self.num_steps * self.optimizer_steps_per_step


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    """Partial rollouts with over-sampling."""

    group_size: int = within(">= 1", 8)  # G, samples of one prompt
    # α: samples in flight ÷ samples that a step needs
    over_sampling_factor: float = within(">= 1", 1.5)
    refill: bool = True  # fill a finished sample's slot at once; false: one-shot over-provisioning
    # most policy versions between a token's sampling and its training
    max_staleness: int = within(">= 0", 8)
    on_stale: OnStale = OnStale.finish
    resume: Resume = Resume.auto  # how a parked sample continues
    max_response_tokens: int = within(">= 1", 16384)  # limit of a sample, all its turns together
    temperature: float = within("> 0", 1.0)  # sampling temperature
    drain_steps: int = within(">= 0", 0)  # number of last steps that open no new prompts
    # engine steps between two decisions of the controller; auto: 32, or 8 if responses are short or
    # have turns, or more with over 256 engines
    tick_steps: int | str = within(">= 1 or auto", "auto")

    def __post_init__(self) -> None:
        check_bounds("rollout", self)

    @property
    def steps_per_tick(self) -> int:
        """Return rollout.tick_steps; auto has to be decided before."""
        assert not isinstance(self.tick_steps, str), "rollout.tick_steps=auto is not decided"
        return self.tick_steps


@dataclass(slots=True, kw_only=True)
class LearnerConfig:
    """The training side: FSDP2."""

    max_tokens: int = within(">= 1", 32768)  # tokens of one packed micro-batch
    age_decay: float = within(
        "in (0, 1]", 1.0
    )  # multiplies a token's loss by age_decay ** age; 1: off
    # module:function that maps an age in steps to a token's loss weight; null: age_decay
    age_weight: str | None = None
    # nats; the run warns if the mean |logprob - behaviour_logprob| of age-0 tokens is above this;
    # above 5 times this, the step is skipped and the weights are synced again, and the run ends if
    # that does not help
    max_mismatch: float = within("> 0", 0.05)
    compute_dtype: ComputeDtype = ComputeDtype.auto
    # compile normalisations, MLPs, rotary embeddings and the output layer's passes into few
    # kernels: the same numbers up to rounding, faster on GPUs; needs a C compiler. auto: on GPUs
    fused: bool | str = "auto"
    # attention by FlashAttention-4, which vLLM's build for CUDA ships, on H100, H200 and B200; not
    # tried on a GPU yet, which tools/gpu_acceptance.py does
    flash_attention_4: bool = False
    # share of the layers whose activations are computed twice: less memory, slower; true: all,
    # false: none, auto: the smallest share with which the memory plan fits, and the run says why
    activation_checkpointing: bool | int | float | str = within("in [0, 1] or auto", False)
    # layers whose activations are computed twice keep the output of their attention, which is then
    # computed once; auto: if the memory plan fits with it
    keep_attention: bool | str = "auto"
    # consecutive workers that share one copy of weights, gradients and optimizer state;
    # runtime.num_workers is a multiple of it (hybrid sharding); null: all workers
    shard_size: int | None = within(">= 1", None)
    # on GPU: what moves to the host while the engine generates; a checkpoint reads it there
    offload: Offload = Offload.none
    # mixtures of experts: the pass whose experts an update repeats for each token, so that a ratio
    # compares two policies with the same experts
    router_replay: RouterReplay = RouterReplay.none

    def __post_init__(self) -> None:
        check_bounds("learner", self)
        for key in ("fused", "keep_attention"):
            value = getattr(self, key)
            require(
                value in (True, False, "auto"),
                f"learner.{key} must be true, false or auto, got {value}",
            )
        if self.age_weight is not None:
            require_function("learner.age_weight", self.age_weight, form="null or module:function")
        require(
            self.age_weight is None or self.age_decay == 1,
            f"learner.age_decay={self.age_decay:g} has no effect with learner.age_weight="
            f"{self.age_weight}; remove one of them",
        )

    @property
    def recomputed_share(self) -> float:
        """Return the share of layers that compute activations twice; auto must be decided."""
        share = self.activation_checkpointing
        assert not isinstance(share, str), "learner.activation_checkpointing=auto is not decided"
        return float(share)


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    """Settings of what a run writes to disk: checkpoints to resume from, exports to use.

    The last step always writes both.
    """

    every_steps: int | None = within(">= 1", None)  # steps between checkpoints; null: by time only
    # minutes between checkpoints; null: by steps only
    every_minutes: float | None = within("> 0", 30.0)
    keep_last: int = within(">= 1", 2)  # newest checkpoints to keep; older ones are removed
    # eval/NAME/avg_at_k, pass_at_k or maj_at_k, with NAME of evaluation.sets: the checkpoint with
    # the highest value is kept, too
    best_metric: str | None = None
    # steps between Hugging Face exports; null: only at the end
    export_every_steps: int | None = within(">= 1", None)
    # seconds that a run has to write a checkpoint and end after Ctrl-C or another signal
    stop_deadline_s: float = within("> 0", 120.0)

    def __post_init__(self) -> None:
        check_bounds("checkpoint", self)


@dataclass(slots=True, kw_only=True)
class TrackingConfig:
    """Settings of what a run shows and records; metrics.jsonl is always written."""

    # trackers in addition to metrics.jsonl: any of wandb, trackio and tensorboard; []: none
    backends: list[TrackingBackend] = field(default_factory=lambda: [TrackingBackend.wandb])
    wandb: WandbMode = WandbMode.offline  # with wandb among the backends
    project: str = "april_rl"  # project in W&B and trackio
    # steps between two writes of all samples, to samples/ and as a table to the trackers;
    # samples of the first and the last step and of evaluations are always written, and every 20
    # steps a few are shown; null: none at all
    save_samples_every: int | None = within(">= 1", 10)

    def __post_init__(self) -> None:
        check_bounds("tracking", self)
        names = [backend.value for backend in self.backends]
        require(len(set(names)) == len(names), f"tracking.backends={names} names a tracker twice")
        require(
            self.wandb is not WandbMode.online or "wandb" in names,
            f"tracking.wandb=online has no effect with tracking.backends={names}; add wandb",
        )


@dataclass(slots=True, kw_only=True)
class ProfilerConfig:
    """Steps to trace; the report makes profile/step_N.trace.json.gz, for ui.perfetto.dev."""

    # steps to trace, such as [5,6]; the first two are slower than others
    steps: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class TrainConfig:
    """A whole run.

    With `deterministic`, equal settings and an equal seed give equal samples, metrics and weights,
    on CPU to the last bit, unless a reward times out. It costs the time by which the slowest
    engine, or the score of a sample that has just finished, exceeds a tick (`rollout.tick_steps`
    engine steps); the next tick is already running during that wait.
    """

    name: str = "run"  # name of the run, in outputs/ and in trackers
    seed: int = 0  # seed of all random draws, in [0, 2**32)
    # the checkpoint to resume, or a run directory, whose last checkpoint is used; auto: the run
    # in hydra.run.dir or, if that is not given, the newest unfinished run of this name; null, or
    # auto without such a run: a new run
    resume: str | None = None
    deterministic: bool = False  # wait for engines and scores at every tick, in a fixed order
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    user_code: UserCodeConfig = field(default_factory=UserCodeConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    def __post_init__(self) -> None:
        require(
            self.resume not in ("true", "True", "false", "False"),
            f"resume must be auto, a path or null, got {self.resume}; write "
            f"resume={'auto' if self.resume in ('true', 'True') else 'null'}",
        )

    @property
    def observation_tokens(self) -> int:
        """Return the most tokens that an environment adds to a sample."""
        return self.environment.max_observation_tokens if self.environment.is_set else 0
