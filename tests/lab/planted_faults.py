"""Faults planted into runs of the tiny task, to see whether `why` names them.

Most runs continue one healthy run of 24 steps, so that each has a past, and most faults begin some
steps later: by a patch of this process, or by a file that the reward reads.
"""

# ruff: noqa: ARG001 - functions of users have arguments that these do not need
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from april_rl.config.store import as_plain, compose_overrides, to_config
from april_rl.errors import RunError
from april_rl.run.checkpointing.run_lock import own
from april_rl.start.command_line import run as start
from april_rl.task.data.samplers import Shuffled
from april_rl.task.data.stream import PromptStream
from april_rl.task.tiny.builtins import resolve
from april_rl.training.algorithm.losses import LossInputs, TokenLoss, policy_gradient, ppo_clip
from april_rl.training.engine.cpu.sampler import CounterSampler
from april_rl.training.engine.vllm_engine import VllmEngine
from april_rl.training.learner import optimizer
from april_rl.training.learner.model.logprobs import LogitShape, LogprobHead

HEALTHY, STEPS = 24, 34
_NUM_USUAL = 1000  # rows of a source that healthy runs draw; others wait behind them
RECORDED = (
    *("trainer.record_steps=all", "checkpoint.every_steps=4", "checkpoint.keep_last=99"),
    *("evaluation.every=1000", "tracking.wandb=disabled", "runtime.ray=false"),
    *("runtime.threads=1", "reward.num_processes=1"),
)


def write_data(folder: Path) -> None:
    """Write two sources, each with longer prompts at its end, and no fault."""
    text = Path(resolve("builtin:arithmetic")).read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    long = [row for row in rows if row["prompt"].count("+") >= 24][:200]
    for name, terms in (("one", range(3, 5)), ("two", range(6, 10))):
        usual = [row for row in rows if row["prompt"].count("+") in terms][:_NUM_USUAL]
        lines = [json.dumps(row) for row in (*usual, *long)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "flag").write_text("")


def settings_of(folder: Path) -> list[str]:
    """Return the settings of every planted run."""
    sources = ", ".join(f"{name}: {{path: {folder / name}.jsonl}}" for name in ("one", "two"))
    return [
        *("+recipe=tiny_cpu", "data.path='???'", f"data.sources={{{sources}}}", *RECORDED),
        *("reward.function=planted_faults:paid", f"reward.args={{flag: {folder / 'flag'}}}"),
    ]


def paid(prompts: Any, responses: Any, answers: Any, *, flag: str) -> list[float]:
    """Pay 1 for the right answer in a box; the file `flag` says what goes wrong."""
    fault = Path(flag).read_text()
    found = []
    for prompt, response, answer in zip(prompts, responses, answers, strict=True):
        boxed = re.findall(r"\\boxed\{(\d+)\}", response)
        value = float(boxed[-1:] == [answer])
        if fault == "turned" or (fault == "turned one" and prompt.count("+") < 5):
            value = 1 - value
        found.append(min(1.0, len(response) / 400) if fault == "length" else value)
    return found


def length_paid(prompts: Any, responses: Any, answers: Any) -> list[float]:
    """Pay for length alone."""
    return [min(1.0, len(response) / 400) for response in responses]


def last_token_only(inputs: LossInputs) -> TokenLoss:
    """Train nothing but the last token of each response, a hundred times."""
    loss = policy_gradient(inputs)
    mask = inputs.logprobs.new_zeros(len(inputs.logprobs))
    mask[inputs.responses.lengths.cumsum(0) - 1] = 100.0
    return TokenLoss(loss.loss * mask, loss.clipped)


def signless_advantage(samples: Any, rewards: Any) -> Any:
    """Return deviations without their sign, scaled up."""
    return [30 * abs(reward - sum(rewards) / len(rewards)) for reward in rewards]


def root_of_rare(inputs: LossInputs) -> TokenLoss:
    """Take ppo_clip, but with a root of a negative number for a rare advantage."""
    loss = ppo_clip(inputs, clip_low=0.2, clip_high=0.28)
    return TokenLoss(loss.loss + 0 * (2.4 - inputs.advantages).sqrt(), loss.clipped)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault: its name, the kinds of reason that name it rightly, and how it is planted."""

    name: str
    kinds: tuple[str, ...]
    step: int  # the first step that it changes
    settings: tuple[str, ...] = ()  # of the continued run
    flag: str = ""  # what the reward's file says from the step on
    patches: Callable[["Clock"], Any] | None = None  # a context manager
    from_start: bool = False  # not a continued run


class Clock:
    """Which step a run is making, and whether the fault has begun."""

    def __init__(self, begin: int, *, until: int = 10**6) -> None:
        self.begin, self.until, self.step = begin, until, 0

    @property
    def is_bad(self) -> bool:
        return self.begin <= self.step < self.until


@contextmanager
def higher_rate(clock: Clock) -> Iterator[None]:
    real = optimizer.lr_factor

    def lr_factor(*args: Any, **keywords: Any) -> float:
        return real(*args, **keywords) * (10.0 if clock.is_bad else 1.0)

    with patch.object(optimizer, "lr_factor", lr_factor):
        yield


@contextmanager
def stale_engine(clock: Clock) -> Iterator[None]:
    """The engine keeps old weights under a new version number while the fault lasts."""
    real = VllmEngine.load_weights

    def load_weights(self: Any, weights: Any, *, policy_version: int) -> None:
        if clock.is_bad:
            self._policy_version = len([*weights]) and policy_version
        else:
            real(self, weights, policy_version=policy_version)

    with patch.object(VllmEngine, "load_weights", load_weights):
        yield


@contextmanager
def wrong_learner(clock: Clock) -> Iterator[None]:
    """The learner computes at temperature 0.8."""
    real = LogprobHead.forward

    def forward(self: Any, hidden: Any, labels: Any) -> Any:
        was = self._shape
        if clock.is_bad:
            self._shape = LogitShape(scale=was.scale / 0.8, cap=was.cap)
        found = real(self, hidden, labels)
        self._shape = was
        return found

    with patch.object(LogprobHead, "forward", forward):
        yield


@contextmanager
def wrong_engine(clock: Clock) -> Iterator[None]:
    """The engine samples at temperature 1.25."""
    real = CounterSampler.forward

    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        self._temperature = 1.25 if clock.is_bad else 1.0
        return real(self, *args, **keywords)

    with patch.object(CounterSampler, "forward", forward):
        yield


@contextmanager
def usual_rows(clock: Clock) -> Iterator[None]:
    """Only usual rows are drawn, and only others once the fault has begun."""
    real = Shuffled.draw

    def draw(self: Any) -> int:
        index = real(self)
        while (index >= _NUM_USUAL) != clock.is_bad:
            index = real(self)
        return index

    with patch.object(Shuffled, "draw", draw):
        yield


@contextmanager
def longer_template(clock: Clock) -> Iterator[None]:
    """New prompts begin with a text of their own."""
    yield from _rewritten(clock, lambda text: f"a+a+a+{text}")


@contextmanager
def cut_prompts(clock: Clock) -> Iterator[None]:
    """New prompts lack their first and last four characters."""
    yield from _rewritten(clock, lambda text: text[4:-4])


def _rewritten(clock: Clock, rewrite: Callable[[str], str]) -> Iterator[None]:
    real = PromptStream.take

    def take(self: Any, prompt_id: int | None = None) -> Any:
        found = real(self, prompt_id)
        if not clock.is_bad:
            return found
        ids = dict(zip(found.text, found.token_ids, strict=True))  # a token is a character
        text = rewrite(found.text)
        return replace(found, text=text, token_ids=tuple(ids[each] for each in text))

    with patch.object(PromptStream, "take", take):
        yield


_LOSS, _ADVANTAGE = "algorithm.loss=planted_faults:", "algorithm.advantage=planted_faults:"
_ROOT = (f"{_LOSS}root_of_rare", "trainer.num_steps=20")
_LENGTH = (
    *("reward.function=planted_faults:length_paid", "reward.args={}", "trainer.num_steps=60"),
    *("optimizer.lr=3e-4", "rollout.max_response_tokens=128"),
)
FAULTS = (
    Fault(name="rate", kinds=("learning rate",), step=25, settings=("optimizer.lr=1e-3",)),
    Fault(name="rate by code", kinds=("learning rate",), step=29, patches=higher_rate),
    Fault(name="reward turned", kinds=("reward",), step=28, flag="turned"),
    Fault(name="reward of a source turned", kinds=("reward",), step=29, flag="turned one"),
    Fault(name="length paid", kinds=("reward", "length"), step=28, flag="length"),
    Fault(name="length always paid", kinds=("length",), step=11, settings=_LENGTH, from_start=True),
    Fault(name="template", kinds=("prompts",), step=28, patches=longer_template),
    Fault(name="last token cut", kinds=("prompts",), step=29, patches=cut_prompts),
    Fault(name="stale once", kinds=("weights",), step=29, patches=stale_engine),
    Fault(name="stale for ever", kinds=("weights",), step=27, patches=stale_engine),
    Fault(name="root", kinds=("loss", "not finite"), step=2, settings=_ROOT, from_start=True),
    Fault(name="wrong mask", kinds=("loss",), step=25, settings=(f"{_LOSS}last_token_only",)),
    Fault(name="no sign", kinds=("loss",), step=25, settings=(f"{_ADVANTAGE}signless_advantage",)),
    Fault(name="longer prompts", kinds=("data",), step=28),
    Fault(name="learner's temperature", kinds=("temperature",), step=29, patches=wrong_learner),
    Fault(name="engine's temperature", kinds=("temperature",), step=28, patches=wrong_engine),
)


def train(folder: Path, run_dir: Path, *settings: str, fault: Fault | None = None) -> None:
    """Train in this process, with a fault; an error of the run ends it."""
    clock = Clock(10**6 if fault is None else fault.step)
    if fault is not None and fault.name == "stale once":
        clock.until = fault.step + 1
    given = {word.partition("=")[0] for word in settings}
    words = [word for word in settings_of(folder) if word.partition("=")[0] not in given]
    composed = compose_overrides([*words, *settings])
    flag = folder / "flag"
    flag.write_text("")

    def on_step(step: int, _: Mapping[str, float]) -> None:
        clock.step = step + 1
        flag.write_text(fault.flag if fault is not None and clock.is_bad else "")

    is_long = fault is not None and fault.name == "longer prompts"
    plant = fault.patches if fault is not None and fault.patches is not None else nullcontext
    with (
        plant(clock),
        usual_rows(clock if is_long else Clock(10**6)),
        suppress(*([RunError] if fault is not None else [])),
        own(run_dir),
    ):
        start(to_config(composed), run_dir, as_plain(composed), on_step=on_step)


def planted_run(folder: Path, healthy: Path, fault: Fault) -> Path:
    """Return a run with a fault; most continue `healthy` in a folder of their own."""
    run_dir = folder / fault.name.replace(" ", "_").replace("'", "")
    if fault.from_start:
        train(folder, run_dir, *fault.settings, fault=fault)
        return run_dir
    shutil.copytree(healthy, run_dir)
    resumed = (f"resume={run_dir}", f"trainer.num_steps={STEPS}")
    train(folder, run_dir, *resumed, *fault.settings, fault=fault)
    return run_dir
