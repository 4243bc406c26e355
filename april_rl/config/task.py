"""Settings of the task: model, data, reward, evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from april_rl.config.checks import check_bounds, require, require_function, within
from april_rl.config.choices import Extract

MISSING = "???"  # OmegaConf's marker for a value that the user must give
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
TASK_PREFIX = "reasoning_gym:"  # begins the path of a task whose rows are drawn
SAMPLERS = ("shuffled", "pass_rate")
BUILTIN_REWARDS = (  # each is a module of `rewards/builtin/`
    "math_verify",
    "exact",
    "last_number",
    "format",
    "length",
    "code",
    "judge",
    "reward_model",
    "reasoning_gym",
    "environment",
)


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """The model to train."""

    path: str = MISSING  # Hugging Face folder or hub id, or builtin:tiny

    def __post_init__(self) -> None:
        require(self.path != "", "model.path is empty: give a folder, a hub id or builtin:tiny")


@dataclass(slots=True, kw_only=True)
class PromptSetConfig:
    """Source of rows, and the settings that turn them into prompts and answers."""

    # .jsonl, .json or .parquet file, Hugging Face data set id (OWNER/NAME, or
    # OWNER/NAME:CONFIGURATION if there are several: openai/gsm8k:main), reasoning_gym:NAME, or
    # builtin:arithmetic
    path: str = ""
    split: str = "train"  # split of a data set id
    # column with the question, as text or chat messages; a dotted path descends into structs
    prompt_column: str = "prompt"
    answer_column: str = "answer"  # column that the reward compares a response with
    # regular expression with one group: the question within the text of the prompt column, if the
    # data set writes instructions around it
    prompt_pattern: str | None = None
    # regular expression with one group: the answer within the text of the answer column; of several
    # matches the last one counts. GSM8K's is '####\s*(.+)'
    answer_pattern: str | None = None
    instruction: str | None = None  # appended to the question as a paragraph of its own
    # chat: the tokenizer's chat template around one user message (or a list of messages); plain:
    # the prompt alone; or a text with {prompt}, such as 'Q: {prompt} A:'
    template: str = "chat"
    system_prompt: str | None = None  # chat only: system message before the question
    # variables of the tokenizer's chat template, such as {enable_thinking: false} for Qwen3
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # settings of a reasoning_gym task, such as {max_digits: 1}; size is the number of rows; another
    # set takes them from `data` only if it has the same path
    args: dict[str, Any] = field(default_factory=dict)
    environment: bool = False  # the environment replies to the turns; else a response is one turn

    @property
    def is_chat(self) -> bool:
        return self.template == "chat"


@dataclass(slots=True, kw_only=True)
class PromptSetOverrides:
    """The same settings for a source or an evaluation set; null: the value in `data`. An empty
    `instruction` or `system_prompt` takes away the one in `data`.
    """

    path: str = MISSING
    split: str | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    prompt_pattern: str | None = None
    answer_pattern: str | None = None
    instruction: str | None = None
    template: str | None = None
    system_prompt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    args: dict[str, Any] | None = None
    environment: bool | None = None


@dataclass(slots=True, kw_only=True)
class SourceConfig(PromptSetOverrides):
    """One source of a mixture."""

    # share of prompts drawn from it, relative to the others
    weight: float = within("> 0", 1.0)

    def __post_init__(self) -> None:
        check_bounds("data.sources.*", self)


@dataclass(slots=True, kw_only=True)
class DataConfig(PromptSetConfig):
    """The training prompts: one set (`path`), or a mixture (`sources`)."""

    path: str = MISSING  # leave unset with `sources`
    # name: {path: ..., weight: ...}; settings that a source leaves out are as in `data`
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    max_prompt_tokens: int = within(">= 1", 1024)  # longer prompts are left out and counted
    deduplicate: bool = True  # rows with the same prompt and answer are used once
    # which prompt comes next: shuffled (each once an epoch), pass_rate (prompts without signal are
    # often skipped), or module:Class
    sampler: str = "shuffled"
    # keyword arguments of the sampler; pass_rate takes low, high, forget and least
    sampler_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds("data", self)
        require_function("data.sampler", self.sampler, form="module:Class", known=SAMPLERS)
        require(
            self.sampler != "shuffled" or not self.sampler_args,
            "data.sampler_args has no effect with data.sampler=shuffled; remove it",
        )
        _check_set("data", self)
        _check_sets("data.sources", self.sources)
        _check_args("data", self.args, f"path={self.path}" if self.path else "sources")
        require(
            bool(self.path) or bool(self.sources),
            "data.path is empty: give a file, a data set id or a builtin, or a mixture in "
            "data.sources",
        )
        require(
            self.path in ("", MISSING) or not self.sources,
            f"data.path={self.path} has no effect with data.sources: write it into the mixture, "
            "or leave one of them out",
        )


@dataclass(slots=True, kw_only=True)
class RewardFunctionConfig:
    """One of several reward functions."""

    function: str = MISSING  # a built-in or module:function, as reward.function
    weight: float = 1.0  # weight of its value in the reward; may be negative
    sources: list[str] | None = (
        None  # names in data.sources (or evaluation.sets) that it scores; null: all
    )
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the function


@dataclass(slots=True, kw_only=True)
class RewardConfig:
    """Settings of the reward."""

    # math_verify, exact, last_number, format, length, code, judge, reward_model, reasoning_gym,
    # environment (its rewards, added up over the turns); or module:function, called with (prompts,
    # responses, answers) and any data column it names
    function: str = "math_verify"
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of `function`
    # name: {function: ..., weight: ...}, in place of `function`; the reward is their weighted sum,
    # and in an evaluation the first that scores a set says whether a sample is right
    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    extract: Extract = Extract.auto  # where math_verify, exact and last_number find the answer
    num_processes: int = within(">= 1", 2)  # processes that score responses
    # limit for scoring a response: after it the process is killed and the score tried again, and
    # then the group is dropped; after a third of it math_verify scores 0, which is counted
    hard_timeout_s: float = within("> 1", 10.0)

    def __post_init__(self) -> None:
        check_bounds("reward", self)
        require(
            not self.functions or (self.function == "math_verify" and not self.args),
            f"reward.function={self.function} has no effect with reward.functions: write it into "
            "reward.functions",
        )
        require_function("reward.function", self.function, known=BUILTIN_REWARDS)
        for name, chosen in self.functions.items():
            _check_name("reward.functions", name)
            key = f"reward.functions.{name}.function"
            require_function(key, chosen.function, known=BUILTIN_REWARDS)

    @property
    def soft_timeout_s(self) -> int:
        """Return the whole seconds after which math_verify gives a response 0."""
        return max(1, int(self.hard_timeout_s / 3))

    def environment_weight(self, dataset: str) -> float:
        """Return the weight of the function `environment` in the reward of a data set, or 0.0."""
        if not self.functions:
            return float(self.function == "environment")
        return sum(
            chosen.weight
            for chosen in self.functions.values()
            if chosen.function == "environment"
            and (chosen.sources is None or dataset in chosen.sources)
        )


@dataclass(slots=True, kw_only=True)
class EvaluationSetConfig(PromptSetOverrides):
    """One held-out set; null: the value in `evaluation`, or in `data`; the default of `split` is
    test.
    """

    num_samples: int | None = within(">= 1", None)
    temperature: float | None = within("> 0", None)
    top_p: float | None = within("in (0, 1]", None)
    max_response_tokens: int | None = within(">= 1", None)
    max_prompts: int | str | None = within(">= 1 or all", None)


@dataclass(slots=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out sets during training."""

    sets: dict[str, EvaluationSetConfig] = field(default_factory=dict)  # name: {path: ..., ...}
    # steps between evaluations, which also precede the first step and follow the last
    every: int = within(">= 1", 10)
    num_samples: int = within(">= 1", 1)  # k of avg@k, pass@k and maj@k
    temperature: float | None = within("> 0", None)  # null: rollout.temperature
    top_p: float = within("in (0, 1]", 1.0)  # total probability of the tokens to sample from
    max_response_tokens: int | None = within(">= 1", None)  # null: rollout.max_response_tokens
    # prompts of each set; null: all, which a set writes as `max_prompts: all`
    max_prompts: int | None = within(">= 1", None)

    def __post_init__(self) -> None:
        require(
            self.every >= 1,
            f"evaluation.every must be >= 1, got {self.every}; evaluation.sets.NAME=null turns the "
            "evaluation of a set off",
        )
        check_bounds("evaluation", self)
        _check_sets("evaluation.sets", self.sets)
        for name, chosen in self.sets.items():
            check_bounds(f"evaluation.sets.{name}", chosen)


def _check_sets(section: str, sets: Mapping[str, PromptSetOverrides]) -> None:
    for name, chosen in sets.items():
        _check_name(section, name)
        require(
            chosen.path not in ("", MISSING),
            f"{section}.{name}.path is empty: give a file or a data set id",
        )
        _check_set(f"{section}.{name}", chosen)
        _check_args(f"{section}.{name}", chosen.args, f"path={chosen.path}")


def _check_set(section: str, chosen: PromptSetConfig | PromptSetOverrides) -> None:
    require(
        chosen.template in (None, "chat", "plain") or "{prompt}" in str(chosen.template),
        f"{section}.template must be chat, plain or a text with {{prompt}}, got {chosen.template}",
    )
    _check_pattern(f"{section}.prompt_pattern", chosen.prompt_pattern)
    _check_pattern(f"{section}.answer_pattern", chosen.answer_pattern)


def _check_args(section: str, args: Mapping[str, Any] | None, rows: str) -> None:
    """Check that `rows`, the setting that names the rows of a section, is a task if it has args."""
    require(
        not args or rows.startswith(f"path={TASK_PREFIX}"),
        f"{section}.args={args} has no effect with {section}.{rows}: only {TASK_PREFIX}NAME has "
        f"settings; {section}.args=null (in a recipe, args: null) removes them, also those that a "
        "recipe inherits",
    )


def _check_name(section: str, name: str) -> None:
    require(
        _NAME.fullmatch(name) is not None,
        f"{section}.{name}: a name has letters, digits, '_', '.' and '-' only; "
        "it becomes part of metric keys",
    )


def _check_pattern(key: str, pattern: str | None) -> None:
    if pattern is None:
        return
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{key} is not a regular expression: {error}, got {pattern}") from error
    require(
        num_groups == 1,
        f"{key} must have one group, (...), around the wanted text, got {pattern}",
    )
