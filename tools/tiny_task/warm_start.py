"""A short supervised pass that teaches a tiny Qwen3 the task's two styles and when to stop.

It takes one epoch over fresh problems: rows are grouped by length, so that little is padding, and
the groups come in random order. The loss is the mean over response tokens; prompt tokens have no
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tiny_task.problems import HASTY_FRACTION, Problem, worked_solution

IGNORED = -100  # label of a token that has no loss


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Settings: the model's shape and its training."""

    hidden_size: int = 128
    intermediate_size: int = 512
    num_layers: int = 2
    num_heads: int = 4
    # About 1 / sqrt(hidden_size); with the usual 0.02 a model this narrow learns far more slowly.
    init_std: float = 0.08
    hasty_fraction: float = HASTY_FRACTION  # share of the worked solutions
    num_rows: int = 32_000
    batch_tokens: int = 2048  # padding included
    lr: float = 3e-3
    warmup_fraction: float = 0.05
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Row:
    """A prompt with its worked solution and <eos>."""

    token_ids: list[int]
    prompt_length: int


Batch = list[_Row]


def warm_start(
    settings: WarmStart,
    problems: list[Problem],
    tokenizer: PreTrainedTokenizerFast,
    *,
    shown: Callable[[list[Batch]], Iterable[Batch]] = iter,
) -> Qwen3ForCausalLM:
    """Train a policy on one worked solution of each problem and return it in bfloat16; seeded.
    `shown` is called with all batches and yields them, so that it can show progress.
    """
    torch.manual_seed(settings.seed)
    random = Random(settings.seed)
    rows = _rows(problems, tokenizer, random, hasty_fraction=settings.hasty_fraction)
    batches = _batches(rows, settings.batch_tokens, random)
    model = build_model(settings, tokenizer)
    optimizer = _optimizer(model, settings)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=settings.lr,
        total_steps=len(batches),
        pct_start=settings.warmup_fraction,
        cycle_momentum=False,
    )
    for batch in shown(batches):
        loss = model(**_tensors(batch, tokenizer.pad_token_id), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.bfloat16()
    return model


def _optimizer(model: Qwen3ForCausalLM, settings: WarmStart) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)


def build_model(settings: WarmStart, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3 in float32 that stops at the tokenizer's <eos>."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads // 2,
        head_dim=32,
        initializer_range=settings.init_std,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def _rows(
    problems: list[Problem],
    tokenizer: PreTrainedTokenizerFast,
    random: Random,
    *,
    hasty_fraction: float,
) -> list[_Row]:
    """Return one row for each problem, in order."""
    prompts = [problem.prompt for problem in problems]
    solutions = [worked_solution(p, random, hasty_fraction=hasty_fraction) for p in problems]
    pairs = zip(problems, solutions, strict=True)
    texts = [p.prompt + text + tokenizer.eos_token for p, text in pairs]
    encoded = tokenizer(texts)["input_ids"]
    lengths = [len(ids) for ids in tokenizer(prompts)["input_ids"]]
    return [_Row(ids, length) for ids, length in zip(encoded, lengths, strict=True)]


def _batches(rows: list[_Row], batch_tokens: int, random: Random) -> list[Batch]:
    """Group rows of similar length into batches of at most `batch_tokens` with padding; shuffle
    them.
    """
    batches = list(_cut(sorted(rows, key=lambda row: len(row.token_ids)), batch_tokens))
    random.shuffle(batches)
    return batches


def _cut(rows: list[_Row], batch_tokens: int) -> Iterator[Batch]:
    """Yield consecutive batches of `rows`, which are sorted by length."""
    batch: Batch = []
    for row in rows:
        if batch and len(row.token_ids) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _tensors(batch: Batch, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `labels` [rows, longest row], padded on the right."""
    ids = [torch.tensor(row.token_ids) for row in batch]
    input_ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad_token_id)
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=IGNORED)
    for row, label in zip(batch, labels, strict=True):
        label[: row.prompt_length] = IGNORED
    return {"input_ids": input_ids, "labels": labels}
