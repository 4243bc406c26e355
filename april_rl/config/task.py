"""What is learned: model, data, reward, algorithm, evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field

from april_rl.config.checks import above, at_least, require
from april_rl.config.choices import (
    Advantage,
    Ratio,
    Template,
)

MISSING = "???"  # OmegaConf's mark for a value the user must give


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """The policy."""

    path: str = MISSING  # Hugging Face folder or hub id, or builtin:tiny


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
        at_least("data", 1, max_prompt_tokens=self.max_prompt_tokens)
        require("{prompt}" in self.plain_template, "data.plain_template must contain {prompt}")


@dataclass(slots=True, kw_only=True)
class AlgorithmConfig:
    """From rewards to per-token loss."""

    advantage: Advantage = Advantage.grpo
    ratio: Ratio = Ratio.proximal  # what the clipped ratio is taken against
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.28  # DAPO's clip-higher
    tis_cap: float | None = (
        2.0  # truncated importance sampling: upper bound of the weight; null: off
    )
    dynamic_sampling: bool = (
        False  # reject groups whose rewards are all equal and refill their slots
    )
    overlong_buffer_tokens: int = (
        0  # DAPO's soft overlong punishment over the last so many tokens; 0: off
    )
    overlong_penalty: float = 1.0  # reward taken off at the end of the buffer

    def __post_init__(self) -> None:
        above("algorithm", 0, clip_low=self.clip_low, clip_high=self.clip_high)
        require(self.clip_low < 1, f"algorithm.clip_low must be < 1, got {self.clip_low}")
        at_least("algorithm", 1, tis_cap=self.tis_cap)
        require(
            self.ratio is Ratio.proximal or self.tis_cap is None,
            "algorithm.tis_cap must be null with algorithm.ratio=behaviour: "
            "the ratio already carries the importance weight",
        )
        at_least(
            "algorithm",
            0,
            overlong_buffer_tokens=self.overlong_buffer_tokens,
            overlong_penalty=self.overlong_penalty,
        )


@dataclass(slots=True, kw_only=True)
class RewardConfig:
    """What a response is worth."""

    function: str = "math_verify"  # or module:function, called with (prompts, responses, answers)
    num_processes: int = 2
    soft_timeout_s: int = 3  # whole seconds; math_verify gives up on a response: value 0, counted
    hard_timeout_s: float = (
        10.0  # the process is killed, the sample scored once more, then its group dropped
    )

    def __post_init__(self) -> None:
        at_least("reward", 1, num_processes=self.num_processes, soft_timeout_s=self.soft_timeout_s)
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
