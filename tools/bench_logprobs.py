"""Log-probabilities without the logits against the whole float32 softmax: memory, time, error.

Each cell is a fresh process, and methods take turns in rounds. Memory is the growth of the
process's peak over one forward and backward pass, gradients of hidden states and weights included.
Naive is what one would write: all logits, float32, `log_softmax`, gather; it gives no entropy, the
learner's output layer does. Errors are those of float32 computation against float64 on the same
inputs, and of bfloat16 computation against the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from bench_device import timed
from bench_memory import PeakMemory, in_fresh_process
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from april_rl.learner.logprobs import LogprobHead

TEMPERATURE = 0.8
ERROR_TOKENS = 256  # of the float64 reference, whose logits exist whole
_LOGIT_SCALE = 3.0  # standard deviation, about that of a language model
_CPU = torch.device("cpu")

# From hidden states [N, H], output weights [V, H] and labels [N] to log-probabilities [N].
Method = Callable[[Tensor, nn.Parameter, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One output layer."""

    num_tokens: int  # N
    hidden_size: int  # H
    vocabulary: int  # V


def add_logprobs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `logprobs`."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-tokens", type=int, nargs="+", default=(2048, 4096))
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)


def bench_logprobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every method at every size and print the table; return its rows."""
    sizes = [
        Size(num_tokens=n, hidden_size=args.hidden_size, vocabulary=args.vocabulary)
        for n in args.num_tokens
    ]
    turns = [(s, name) for _ in range(args.rounds) for s in sizes for name in METHODS]
    found: dict[tuple[Size, str], list[tuple[float, float]]] = {}
    for size, name in track(turns, description="memory and time"):
        found.setdefault((size, name), []).append(in_fresh_process(cost, size, name, device=_CPU))
    errors = {name: in_fresh_process(error_of, sizes[0], name, device=_CPU) for name in METHODS}
    rows = [row_of(size, name, found[size, name]) | errors[name] for size, name in found]
    for row in rows:
        naive = next(
            r for r in rows if (r["method"], r["num_tokens"]) == ("naive", row["num_tokens"])
        )
        row["memory_of_naive"] = row["peak_mib"] / naive["peak_mib"]
        row["time_of_naive"] = row["time_s"] / naive["time_s"]
    _show(rows)
    return rows


def naive(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
    """Return log-probabilities from the whole softmax in float32."""
    logits = (hidden @ weight.T).float() / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def chunked(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
    """Return log-probabilities from the learner's output layer."""
    logprobs: Tensor = LogprobHead(weight, temperature=TEMPERATURE)(hidden, labels)[0]
    return logprobs


METHODS: dict[str, Method] = {"naive": naive, "chunked": chunked}


def random_layer(
    size: Size, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, nn.Parameter, Tensor]:
    """Return hidden states, output weights and labels, the same in every precision up to
    rounding.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.num_tokens, size.hidden_size, generator=generator)
    weight = torch.empty(size.vocabulary, size.hidden_size, dtype=torch.bfloat16)
    weight.normal_(std=_LOGIT_SCALE / size.hidden_size**0.5, generator=generator)
    labels = torch.randint(size.vocabulary, (size.num_tokens,), generator=generator)
    rounded = hidden.to(torch.bfloat16).to(device, dtype)
    return rounded.requires_grad_(), nn.Parameter(weight.to(device, dtype)), labels.to(device)


def cost(size: Size, name: str, *, device: torch.device) -> tuple[float, float]:
    """Return peak memory in MiB and seconds of a forward and backward pass in bfloat16.

    A pass over few tokens before it loads the kernels.
    """
    hidden, weight, labels = random_layer(size, dtype=torch.bfloat16, device=device)
    _pass(METHODS[name], hidden[:8].detach().requires_grad_(), weight, labels[:8])
    with PeakMemory(device) as peak:
        gradients = _pass(METHODS[name], hidden, weight, labels)
    del gradients
    return peak.mib, timed(lambda: _pass(METHODS[name], hidden, weight, labels), device)


def _pass(method: Method, hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(method(hidden, weight, labels).sum(), (hidden, weight))


def error_of(size: Size, name: str, *, device: torch.device) -> dict[str, float]:
    """Return errors against the whole softmax in float64, over `ERROR_TOKENS` tokens: the largest
    of the log-probabilities in nats, and the relative error of the gradients as a whole.
    """
    few = Size(num_tokens=ERROR_TOKENS, hidden_size=size.hidden_size, vocabulary=size.vocabulary)
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        hidden, weight, labels = random_layer(few, dtype=dtype, device=device)
        method = _in_float64 if dtype is torch.float64 else METHODS[name]
        logprobs = method(hidden, weight, labels)
        of_hidden, _ = torch.autograd.grad(logprobs.sum(), (hidden, weight))
        found[dtype] = logprobs.detach().double(), of_hidden.double()
    exact, exact_gradient = found.pop(torch.float64)
    errors = {}
    for dtype, (logprobs, gradient) in found.items():
        key = str(dtype).removeprefix("torch.")
        errors[f"error_{key}_nats"] = (logprobs - exact).abs().max().item()
        difference = (gradient - exact_gradient).norm() / exact_gradient.norm()
        errors[f"gradient_error_{key}"] = difference.item()
    return errors


def _in_float64(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
    logprobs = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(-1, labels[:, None])[:, 0]


def row_of(size: Size, name: str, rounds: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return medians over rounds."""
    peaks, seconds = zip(*rounds, strict=True)
    return {
        "method": name,
        "num_tokens": size.num_tokens,
        "hidden_size": size.hidden_size,
        "vocabulary": size.vocabulary,
        "peak_mib": median(peaks),
        "time_s": median(seconds),
        "time_s_min": min(seconds),
        "time_s_max": max(seconds),
    }


def _show(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    table = Table(
        title=f"log-probabilities of N tokens, V = {first['vocabulary']:,}, H = "
        f"{first['hidden_size']:,}, bfloat16, forward and backward"
    )
    heads = ("method", "N", "peak", "÷ naive", "time (min-max)", "÷ naive")
    for head in (*heads, "error fp32", "error bf16", "gradient fp32", "gradient bf16"):
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['num_tokens']:,}",
            f"{row['peak_mib']:,.0f} MiB",
            f"{row['memory_of_naive']:.3f}",
            f"{row['time_s']:.2f} s ({row['time_s_min']:.2f}-{row['time_s_max']:.2f})",
            f"{row['time_of_naive']:.2f}",
            f"{row['error_float32_nats']:.1e}",
            f"{row['error_bfloat16_nats']:.1e}",
            f"{row['gradient_error_float32']:.1e}",
            f"{row['gradient_error_bfloat16']:.1e}",
        )
    console = Console(width=150)
    console.print(table)
    worst = max(row["memory_of_naive"] for row in rows if row["method"] == "chunked")
    console.print(f"chunked takes {worst:.3f} of naive's peak memory at most (asked for: 0.2)")
