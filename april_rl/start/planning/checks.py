"""Every check of a start is an entry of a list here; the lists are in the order of what they cost.

`SETTINGS` needs the settings and small files, and imports nothing heavy; `MACHINE` the machine or
cluster; `FACTS` the config.json of each model, too; `MODELS` their sizes, for which torch is
imported. After them come `USER_CODE` (`assembly/own_functions.py`), and what needs data or an
engine, which is tried where `assembly/` builds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from april_rl.config import TrainConfig
from april_rl.config.user_code import Hook, OwnFunctionError, check_args, check_named, signature_of
from april_rl.errors import PreflightError, RunError
from april_rl.start.planning.machine import Machine, wrong_engine, wrong_tools
from april_rl.start.planning.memory_plan import GIB
from april_rl.start.planning.model_folder import check_model_folder
from april_rl.start.planning.sizes import batch_tokens, context_length
from april_rl.start.planning.versions import check_versions
from april_rl.task.data.files import check_files
from april_rl.task.rewards.functions import RewardFunction, reward_functions
from april_rl.task.rewards.loading import LISTS, Reward
from april_rl.task.tiny.builtins import resolve_builtins
from april_rl.training.batch.packing import TOKEN_BYTES
from april_rl.training.runtime.layout import Layout

if TYPE_CHECKING:
    from april_rl.start.planning.facts import Facts, ModelFacts, Models

# Weights that vLLM copies outside the loaders that a weight sync uses (its models/gpt_oss.py).
_NEVER_NEW = {"gpt_oss": "attention sinks and experts"}

T = TypeVar("T")


class AskedSettings(NamedTuple):
    """Settings of a command, with builtin paths replaced, and what it does with them."""

    config: TrainConfig
    trains: bool
    evaluates: bool
    loads_model: bool  # otherwise a folder that has only a tokenizer is enough


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRun:
    """Settings with a layout on a machine."""

    config: TrainConfig
    layout: Layout
    machine: Machine
    trains: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun(PlacedRun):
    """A run on a machine, with what the config.json of its models says."""

    facts: Facts


class CountedModels(NamedTuple):
    """Settings, and the sizes of the models."""

    config: TrainConfig
    models: Models
    trains: bool


def failures(checks: Iterable[Callable[[T], object]], known: T) -> list[RunError]:
    """Run all checks, and return the error of each that fails."""
    found = []
    for check in checks:
        try:
            check(known)
        except RunError as error:
            found.append(error)
    return found


def raise_all(found: Sequence[RunError]) -> None:
    """Raise the only error, or one error that lists all."""
    if len(found) == 1:
        raise found[0]
    if found:
        lines = "\n".join(f"  - {text}" for text in dict.fromkeys(map(str, found)))
        raise PreflightError(f"this run cannot start here:\n{lines}")


def check_settings(
    config: TrainConfig, *, trains: bool = True, evaluates: bool = True, loads_model: bool = True
) -> TrainConfig:
    """Return the settings with builtin paths replaced; raise RunError for all that is wrong in
    them. A command that does not train, evaluate or load the model skips what only that needs.
    """
    asked = AskedSettings(resolve_builtins(config), trains, evaluates, loads_model)
    raise_all(failures(SETTINGS, asked))
    return asked.config


def _context(asked: AskedSettings) -> None:
    config = asked.config
    sets = config.evaluation.sets if asked.evaluates else {}
    counted = replace(config, evaluation=replace(config.evaluation, sets=sets))
    context_length(counted, is_training=asked.trains)


def _policy_folder(asked: AskedSettings) -> None:
    if asked.loads_model:
        check_model_folder(asked.config.model.path)


def _folders_beside(asked: AskedSettings) -> None:
    config = asked.config
    for key, path in (("teacher.path", config.teacher.path), ("critic.path", config.critic.path)):
        if path and asked.trains:
            check_model_folder(path, key=key)


def _functions(asked: AskedSettings) -> None:
    for key, function in _own_functions(asked):
        Hook(key, function).call(partial(check_named, function), "cannot be loaded")
    for each in _own_rewards(asked):
        _columns_of(each)


def _files(asked: AskedSettings) -> None:
    taken = []
    for each in _own_rewards(asked):
        with suppress(OwnFunctionError):  # another check reports it
            taken.append((each, _columns_of(each)))
    check_files(
        asked.config,
        trains=asked.trains,
        evaluates=asked.evaluates,
        columns_of=lambda name: {
            c for each, columns in taken if each.scores(name) for c in columns
        },
    )


def _own_functions(asked: AskedSettings) -> Iterator[tuple[str, str]]:
    config, algorithm = asked.config, asked.config.algorithm
    named: list[tuple[str, str | None]] = [
        (each.key, each.function) for each in reward_functions(config.reward)
    ]
    named.append(("environment.function", config.environment.function))
    if asked.trains:
        named += [
            ("algorithm.loss", algorithm.loss),
            ("algorithm.advantage", algorithm.advantage),
            ("algorithm.group_filter", algorithm.group_filter),
            ("learner.age_weight", config.learner.age_weight),
            ("data.sampler", config.data.sampler),
        ]
    return ((key, function) for key, function in named if function and ":" in function)


def _own_rewards(asked: AskedSettings) -> list[RewardFunction]:
    return [each for each in reward_functions(asked.config.reward) if ":" in each.function]


def _columns_of(function: RewardFunction) -> tuple[str, ...]:
    """Return the data columns that a user's reward takes; raise OwnFunctionError for bad `args`."""

    def read() -> tuple[str, ...]:
        stub = signature_of(function.function)
        if stub is None:
            return ()
        check_args(stub, function.args, given=LISTS)
        return Reward(call=stub, args=function.args).columns

    return Hook(function.key, function.function).call(read, "cannot be loaded")


def _gpus(run: PlacedRun) -> None:
    layout, machine, workers = run.layout, run.machine, run.layout.num_workers
    if layout.device == "cuda" and machine.num_gpus < workers:
        raise PreflightError(
            f"GPUs: runtime.num_workers={workers} needs {workers} GPUs; {machine.name} has "
            f"{machine.num_gpus}"
        )


def _cores(run: PlacedRun) -> None:
    layout, machine, workers = run.layout, run.machine, run.layout.num_workers
    if layout.device == "cpu" and not machine.is_cluster and machine.num_cores < workers:
        raise PreflightError(
            f"cores: runtime.num_workers={workers} needs {workers} cores; this machine has "
            f"{machine.num_cores}: lower it, or join several machines (docs/gpu.md)"
        )


def _engine_options(run: PlacedRun) -> None:
    """Importing vLLM would take seconds, so its source is read."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return
    source = (Path(found.origin).parent / "engine" / "arg_utils.py").read_text("utf-8")
    fields = source.partition("class EngineArgs:")[2].partition("    def ")[0]
    known = re.findall(r"^    (\w+): ", fields, re.MULTILINE)
    if unknown := sorted(set(run.config.engine.args) - set(known)):
        names = " and ".join(f"engine.args.{name}" for name in unknown)
        raise PreflightError(f"{names}: the installed vLLM has no such option; remove it")


def _engine_build(run: PlacedRun) -> None:
    _raise_lines(wrong_engine(run.layout.device, installed=run.machine.engines))


def _kernel_tools(run: PlacedRun) -> None:
    if run.layout.device == "cuda" and run.machine.num_local_gpus:
        _raise_lines(wrong_tools())


def _raise_lines(lines: Sequence[str]) -> None:
    if lines:
        raise PreflightError("\n  - ".join(lines))


def _batch(run: PlacedRun) -> None:
    needed, machine = TOKEN_BYTES * batch_tokens(run.config), run.machine
    if run.trains and needed > machine.free_bytes:
        raise PreflightError(
            "batch: trainer.num_groups · rollout.group_size samples of full length need "
            f"{needed / GIB:,.0f} GiB; this machine has {machine.free_bytes / GIB:.0f} GiB "
            "free: lower one of the two"
        )


def _model_context(run: KnownRun) -> None:
    needed, key = context_length(run.config, is_training=run.trains)
    if needed > (most := run.facts.policy.context_tokens):
        raise PreflightError(
            f"context length: {key} = {needed} exceeds the model's maximum, {most} tokens"
        )


def _heads(run: KnownRun) -> None:
    size, heads = run.layout.tensor_parallel_size, run.facts.policy.num_heads
    if heads % size:
        raise PreflightError(
            f"heads: engine.tensor_parallel_size={size} does not divide the "
            f"model's {heads} attention heads"
        )


def _new_weights(run: KnownRun) -> None:
    kind = run.facts.policy.model_type
    if run.trains and kind in _NEVER_NEW:
        raise PreflightError(
            f"model.path: model_type {kind} cannot be trained: vLLM 0.32 keeps its first "
            f"{_NEVER_NEW[kind]} when new weights are sent. It can be evaluated"
        )


def _prefix_cache(counted: CountedModels) -> None:
    sizes = counted.models.policy
    if sizes.has_states and counted.config.engine.prefix_caching:
        raise PreflightError(
            f"engine.prefix_caching=true: model_type {sizes.model_type} has layers that carry a "
            "state, which vLLM's prefix cache does not support everywhere; set "
            "engine.prefix_caching=false"
        )


def _routers(counted: CountedModels) -> None:
    """The learner knows the routers whose choices it should repeat."""
    sizes, replay = counted.models.policy, counted.config.learner.router_replay
    if counted.trains and replay.is_on and not sizes.has_known_routers:
        raise PreflightError(
            f"learner.router_replay={replay.value}: model_type {sizes.model_type} has no router "
            "whose choices the learner can repeat (docs/usage.md names the families); remove it"
        )


def _beside_reads(run: KnownRun) -> None:
    """A teacher and a critic know every token of the policy, and read the longest sequence."""
    needed, setting = context_length(run.config)
    for key, model in (("teacher.path", run.facts.teacher), ("critic.path", run.facts.critic)):
        if model is None:
            continue
        if model.context_tokens < needed:
            raise PreflightError(
                f"{key}: the model reads at most {model.context_tokens} tokens, and {setting} = "
                f"{needed}: lower these settings, or choose another model"
            )
        _same_tokens(key, model, run.facts.policy)


def _same_tokens(key: str, model: ModelFacts, policy: ModelFacts) -> None:
    if model.path == policy.path:
        return
    theirs = model.vocabulary()
    for token, number in sorted(policy.vocabulary().items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            found = f"is {theirs[token]}" if token in theirs else "does not exist"
            raise PreflightError(
                f"{key}={model.path} has another tokenizer than model.path={policy.path}: token "
                f"{number}, {token!r}, {found} there. It reads the policy's tokens, so both need "
                "one tokenizer"
            )
    if model.vocab_size < policy.vocab_size:
        raise PreflightError(
            f"{key}: the model has a vocabulary of {model.vocab_size} tokens, and the policy has "
            f"{policy.vocab_size}: it must read every token of the policy, so choose another model"
        )


SETTINGS: tuple[Callable[[AskedSettings], None], ...] = (
    lambda _: check_versions(),
    _context,
    _policy_folder,
    _folders_beside,
    _functions,
    _files,
)
MACHINE: tuple[Callable[[PlacedRun], None], ...] = (
    _gpus,
    _cores,
    _engine_options,
    _engine_build,
    _kernel_tools,
    _batch,
)
FACTS: tuple[Callable[[KnownRun], None], ...] = (
    *MACHINE,
    _model_context,
    _heads,
    _new_weights,
    _beside_reads,
)
MODELS: tuple[Callable[[CountedModels], None], ...] = (_prefix_cache, _routers)
