"""What is learned: model, data, reward, evaluation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from april_rl.config.checks import at_least, require
from april_rl.config.choices import Template

MISSING = "???"  # OmegaConf's mark for a value the user must give
_SET_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """The policy."""

    path: str = MISSING  # Hugging Face folder or hub id, or builtin:tiny

    def __post_init__(self) -> None:
        require(self.path != "", "model.path is empty: give a folder, a hub id or builtin:tiny")


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """Where prompts come from and how they are written."""

    path: str = (
        MISSING  # .jsonl, .json or .parquet file, Hugging Face data set id, or builtin:arithmetic
    )
    split: str = "train"  # of a data set id
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    template: Template = Template.chat
    plain_template: str = "{prompt}"
    system_prompt: str = ""  # chat only; empty: none
    max_prompt_tokens: int = 1024  # longer prompts are left out, and counted

    def __post_init__(self) -> None:
        require(self.path != "", "data.path is empty: give a file, a data set id or a builtin")
        at_least("data", 1, max_prompt_tokens=self.max_prompt_tokens)
        require("{prompt}" in self.plain_template, "data.plain_template must contain {prompt}")


@dataclass(slots=True, kw_only=True)
class RewardConfig:
    """What a response is worth."""

    function: str = "math_verify"  # or module:function, called with (prompts, responses, answers)
    num_processes: int = 2
    soft_timeout_s: int = 3  # whole seconds; math_verify gives up on a response: value 0, counted
    hard_timeout_s: float = (
        10.0  # the process is killed, the sample scored once more, then its group dropped
    )
    memory_gib: float = 4.0  # address space of one process; its libraries count too

    def __post_init__(self) -> None:
        at_least(
            "reward",
            1,
            num_processes=self.num_processes,
            soft_timeout_s=self.soft_timeout_s,
            memory_gib=self.memory_gib,
        )
        require(
            self.hard_timeout_s > self.soft_timeout_s,
            f"reward.hard_timeout_s must be > reward.soft_timeout_s ({self.soft_timeout_s}), "
            f"got {self.hard_timeout_s}",
        )


@dataclass(slots=True, kw_only=True)
class EvaluationConfig:
    """Held-out accuracy along the way."""

    sets: dict[str, str] = field(default_factory=dict)  # name: path, with the columns of `data`
    every: int = 10  # steps; also before the first step and after the last
    num_samples: int = 1  # k of avg@k and pass@k
    max_prompts: int = 0  # of each set; 0: all

    def __post_init__(self) -> None:
        at_least("evaluation", 1, every=self.every, num_samples=self.num_samples)
        at_least("evaluation", 0, max_prompts=self.max_prompts)
        for name, path in self.sets.items():
            require(
                _SET_NAME.fullmatch(name) is not None,
                f"evaluation.sets.{name}: a name has letters, digits, '_', '.' and '-' only; "
                "it becomes part of metric keys",
            )
            require(path != "", f"evaluation.sets.{name} is empty: give a file or a data set id")
