"""Compares transformers, learner and engine of one model, in the order of a run's first steps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import has_chat
from april_rl.lab.certify.certificate import CertificateRow
from april_rl.lab.certify.pair import Pair, Say, with_logprobs
from april_rl.lab.certify.reference import Distance, Reference, expect
from april_rl.start.planning.model import without_network_go_offline
from april_rl.task.data.stop_tokens import stop_token_ids
from april_rl.task.data.tokenizer import Tokenizer, load_tokenizer
from april_rl.training.rollout.requests import Sampling
from april_rl.types import Prompt, Sample

_QUESTIONS = (
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Explain.",
    "Write a Python function that returns the n-th Fibonacci number, and say what it costs.",
    "Nenne drei Städte an der Donau und erkläre, wie der Fluss sie geprägt hat.",
    "Solve x^2 - 5x + 6 = 0, check both solutions, and tell a short story about them.",
)
# Two correct sides may differ by this many times what rounding does to one: the order of sums and
# the engine's own exp count in float32, and vanish in bfloat16. A single token may do so more.
_TIMES_NOISE = {torch.float32: 30.0, torch.bfloat16: 4.0}
_LARGEST, _LEAST = 4.0, Distance(1e-6, 1e-5)  # a limit is never less than `_LEAST`
_GRADIENT = {torch.float32: 3e-3, torch.bfloat16: 5e-2}  # |difference| over |gradient|
_GREEDY_TOP_P = 1e-6  # a nucleus of the most likely token alone
_CHANGED = 5.0  # times the limit: by so much updates must move the log-probabilities
_MOST_UPDATES = 20


class Limit:
    """How far two sides may be apart, from what rounding alone does to transformers."""

    def __init__(self, noise: Distance, *, compute: torch.dtype) -> None:
        self._times = _TIMES_NOISE[compute]
        self.mean = max(_LEAST.mean, self._times * noise.mean)
        self.largest = max(_LEAST.largest, _LARGEST * self._times * noise.largest)

    def row(self, name: str, compared: str, found: Distance) -> CertificateRow:
        """Return a comparison with this limit."""
        most, times = Distance(self.mean, self.largest), (self._times, _LARGEST * self._times)
        why = f"{times[0]:g} and {times[1]:g} times what rounding does to transformers itself"
        is_near = found.mean <= most.mean and found.largest <= most.largest
        return CertificateRow(name, compared, str(found), f"{most}: {why}", is_near)


def comparisons(config: TrainConfig, folder: Path, say: Say) -> Iterator[CertificateRow]:
    """Yield each comparison when it has been made; an export is written to `folder` and removed."""
    without_network_go_offline()
    tokenizer = load_tokenizer(config.model.path)
    yield _texts(tokenizer)
    yield _special_tokens(config, prompts := _prompts(tokenizer))
    pair = Pair(config, prompts, folder, say=say)
    with closing(pair.workers):
        yield from _of_pair(pair, folder / "export")


def _of_pair(pair: Pair, export: Path) -> Iterator[CertificateRow]:
    """Compare learner and engine as loaded, after an update, and an export. An engine that sleeps
    gives its memory to the learner, so it samples everything first.
    """
    load = partial(Reference, temperature=pair.temperature)
    fresh, _ = pair.sample()
    most_likely = Sampling(temperature=pair.temperature, top_p=_GREEDY_TOP_P)
    greedy, _ = pair.sample(sampling=most_likely)
    resumed, _ = pair.sample(parts=2)
    kept, num_prefilled = pair.sample(parts=2, keeps=True)
    pair.engine.sleep()
    loaded = partial(load, pair.config.model.path)
    exact, noise = expect(fresh, loaded, compute=pair.compute_dtype)
    limit, expected = Limit(noise, compute=pair.compute_dtype), with_logprobs(fresh, exact)
    alone = [pair.mismatch([sample]) for sample in expected]
    worst = Distance(max(each.mean for each in alone), max(each.largest for each in alone))
    yield limit.row("learner", "learner and transformers, one text at a time", worst)
    yield limit.row("packed", "the same, all texts in one row", pair.mismatch(expected))
    reference = loaded(dtype=torch.float32)
    yield _gradients(pair.gradients(fresh), reference.gradients(fresh), pair.compute_dtype)
    yield limit.row("engine_loaded", "engine and learner, both as loaded", pair.mismatch(fresh))
    how = "the same, interrupted half-way and prefilled again"
    yield limit.row("engine_resumed", how, pair.mismatch(resumed))
    how = f"the same, {num_prefilled} tokens prefilled again"
    yield limit.row("engine_kept", how, pair.mismatch(kept))
    yield _greedy(greedy, reference, tie=limit.largest)
    yield _train_until_moved(pair, fresh, least=_CHANGED * limit.mean)
    synced, _ = pair.sample()
    pair.workers.export(export)
    again, _ = pair.sample()
    pair.engine.sleep()
    exported = partial(load, str(export))
    exact, noise = expect(synced, exported, compute=pair.compute_dtype)
    shutil.rmtree(export)
    limit = Limit(noise, compute=pair.compute_dtype)
    how = "engine and learner after a weight sync"
    yield limit.row("engine_synced", how, pair.mismatch(synced))
    how = "the learner, and transformers with its export"
    yield limit.row("export", how, pair.mismatch(with_logprobs(synced, exact)))
    how = "after it slept" if pair.sleeps else "after the export; engines sleep on GPUs only"
    yield limit.row("engine_again", f"engine and learner {how}", pair.mismatch(again))


def _prompts(tokenizer: Tokenizer) -> list[Prompt]:
    """Return questions as the chat template renders them, or plain without one."""
    is_chat = tokenizer.has_chat_template
    texts = [
        tokenizer.chat_text([{"role": "user", "content": q}]) if is_chat else q for q in _QUESTIONS
    ]
    encoded = enumerate(tokenizer.encode(texts, add_special_tokens=not is_chat))
    return [Prompt(id=n, token_ids=ids, text="", answer="", source="") for n, ids in encoded]


def _texts(tokenizer: Tokenizer) -> CertificateRow:
    """Compare texts whose words the tokenizer knows with themselves, encoded and decoded."""
    encoded = tokenizer.encode(_QUESTIONS, add_special_tokens=False)
    pairs = zip(encoded, _QUESTIONS, strict=True)
    known = [(ids, text) for ids, text in pairs if not any(map(tokenizer.is_special, ids))]
    changed = sum(tokenizer.decode(ids) != text for ids, text in known)
    found = f"{changed} of {len(known)} differ"
    return CertificateRow("text", "texts, encoded and decoded", found, "0", not changed)


def _special_tokens(config: TrainConfig, prompts: Sequence[Prompt]) -> CertificateRow:
    """Compare where a run stops with the end tokens of the files, and prompts with transformers."""
    own = AutoTokenizer.from_pretrained(config.model.path)
    stops = stop_token_ids(config.model.path, is_chat=has_chat(config.data, config.evaluation.sets))
    ends = {own.eos_token_id}
    with suppress(OSError):  # no generation_config.json
        named = GenerationConfig.from_pretrained(config.model.path).eos_token_id
        ends |= {*named} if isinstance(named, list) else {named}
    wrong = [f"no stop at {own.decode([end])} ({end})" for end in sorted(ends - {None, *stops})]
    if any(prompt.token_ids[:2] == (own.bos_token_id,) * 2 for prompt in prompts):
        wrong.append(f"prompts begin with {own.bos_token} twice")
    if own.chat_template is not None:
        chats = [[{"role": "user", "content": question}] for question in _QUESTIONS]
        rendered = own.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        if rendered != [[*prompt.token_ids] for prompt in prompts]:
            wrong.append("transformers renders other prompts")
    what = "a run's stop tokens and prompts, against tokenizer and generation_config.json"
    found = "; ".join(wrong) or f"stops at {', '.join(map(str, stops))}"
    return CertificateRow("special_tokens", what, found, "no difference", not wrong)


def _gradients(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], compute: torch.dtype
) -> CertificateRow:
    worst, name = max(
        (((found[name] - each).norm() / each.norm()).item() if name in found else 1.0, name)
        for name, each in expected.items()
        if each.any()
    )
    what, most = "gradients of all log-probabilities, by parameter", _GRADIENT[compute]
    text = f"at most {worst:.2g} of a gradient's norm ({name})"
    return CertificateRow("gradients", what, text, f"{most:g}", worst <= most)


def _greedy(samples: Sequence[Sample], reference: Reference, *, tie: float) -> CertificateRow:
    wrong = reference.num_not_greedy(samples, tie=tie)
    num_tokens = sum(sample.num_tokens for sample in samples)
    what = "greedy tokens of the engine, and the most likely ones of transformers"
    found, limit = f"{wrong} of {num_tokens:,} differ", f"0, but for ties within {tie:.2g} nats"
    return CertificateRow("greedy", what, found, limit, num_tokens > 0 and not wrong)


def _train_until_moved(pair: Pair, samples: Sequence[Sample], *, least: float) -> CertificateRow:
    """Train until old weights in the engine would show."""
    moved, num_updates = 0.0, 0
    while moved < least and num_updates < _MOST_UPDATES:
        pair.update(samples)
        moved, num_updates = pair.mismatch(samples).mean, num_updates + 1
    what = f"the learner before and after {num_updates} updates, which an engine must follow"
    limit = f"at least {least:.2g} nats, or old weights would not show"
    return CertificateRow("updated", what, f"mean {moved:.2g} nats", limit, moved >= least)
