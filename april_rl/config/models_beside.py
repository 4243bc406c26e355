"""Settings of the models beside the policy: a frozen teacher, and the critic of PPO."""

from __future__ import annotations

from dataclasses import dataclass

from april_rl.config.checks import check_bounds, require, within


@dataclass(slots=True, kw_only=True)
class TeacherConfig:
    """On-policy distillation: the policy samples, the teacher scores the tokens."""

    path: str | None = None  # Hugging Face folder or hub id, with the policy's tokenizer
    # weight of log(teacher / policy), which is added to the advantage of each token
    weight: float = within("> 0", 1.0)
    # in place of path: the address of a server with OpenAI's API that has the teacher, such as
    # http://host:8000/v1; it must return the log-probabilities of prompts (echo), as vLLM's does;
    # a key that it needs is in the environment variable TEACHER_API_KEY
    base_url: str | None = None
    model: str | None = None  # the teacher's name on that server

    @property
    def is_set(self) -> bool:
        return bool(self.path or self.base_url)

    def __post_init__(self) -> None:
        check_bounds("teacher", self)
        require(
            not (self.path and self.base_url),
            "teacher.path and teacher.base_url: there is one teacher; set one of the two to null",
        )
        require(
            not self.base_url or bool(self.model),
            f"teacher.base_url={self.base_url} needs teacher.model, the teacher's name there",
        )
        require(
            self.is_set or self.weight == 1,
            f"teacher.weight={self.weight} has no effect without teacher.path; set teacher.path, "
            "or remove it",
        )
        require(
            bool(self.base_url) or not self.model,
            f"teacher.model={self.model} has no effect without teacher.base_url; set "
            "teacher.base_url, or remove it",
        )


@dataclass(slots=True, kw_only=True)
class CriticConfig:
    """PPO's value model: it is trained in full, in addition to the policy, with the settings of
    `optimizer` except for the learning rate.
    """

    path: str | None = None  # model whose backbone the critic starts from; null: model.path
    lr: float = within("> 0", 1e-5)  # learning rate, in place of optimizer.lr
    warmup_steps: int = within(">= 0", 0)  # first steps, which train only the critic
    policy_lambda: float = within("in [0, 1]", 0.95)  # λ of the policy's advantages
    # λ of the critic's targets: with 1 a target is the reward itself and does not depend on the
    # critic (Yuan et al. 2025, VC-PPO, decoupled GAE)
    value_lambda: float = within("in [0, 1]", 1.0)
    # a value gains nothing from moving further than this in an update
    value_clip: float | None = within("> 0", None)

    def __post_init__(self) -> None:
        check_bounds("critic", self)
