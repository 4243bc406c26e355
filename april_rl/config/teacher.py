"""Settings of a teacher: a frozen model whose probabilities the policy learns."""

from __future__ import annotations

from dataclasses import dataclass, fields

from april_rl.config.checks import check_bounds, require, within


@dataclass(slots=True, kw_only=True)
class TeacherConfig:
    """On-policy distillation: the policy samples, the teacher scores the tokens."""

    path: str = ""  # Hugging Face folder or hub id, with the policy's tokenizer; empty: no teacher
    # weight of log(teacher / policy), which is added to the advantage of each token
    weight: float = within("> 0", 1.0)

    def __post_init__(self) -> None:
        check_bounds("teacher", self)
        for entry in fields(self) if not self.path else ():
            value = getattr(self, entry.name)
            require(
                value == entry.default,
                f"teacher.{entry.name}={value} has no effect without teacher.path; set "
                "teacher.path, or remove it",
            )
