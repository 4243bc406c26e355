"""The page of models, docs/models.md: its rows, and the parts that stay when it is written
again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import transformers

_TOOLS = Path(__file__).parents[1]
_TOLERANCE = 1e-4  # nats, between engine and learner
# Parts of the project's own messages, and the words that the page uses.
_REFUSALS = {
    "experts of a mixture-of-experts model cannot have adapters": "experts",
    "has experts": "experts",
    "peft takes no such layers": "by peft",
    "set lora.sync=merged": "set `lora.sync=merged`",
}


class Result(Enum):
    """Result for an architecture."""

    right = "right"
    wrong = "WRONG"
    refused = "refused"
    untried = "not tried"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One row of the table."""

    model_type: str
    result: Result
    why: str  # features that were tested, or the reason
    engine: str = ""  # vLLM's result
    adapter: str = ""  # vLLM's result for adapters alone

    def __str__(self) -> str:
        cells = (self.result.value, self.engine, self.adapter, self.why)
        return f"| `{self.model_type}` | {' | '.join(cells)} |"


def _reason(printed: str) -> str:
    """Return the last error that was printed, without paths; a missing package comes first."""
    errors = re.findall(r"\w+(?:Error|Exception): .*|AssertionError", printed)
    missing = [error for error in errors if error.startswith("ModuleNotFoundError")]
    last = (missing or errors or ["no error was printed"])[-1]
    return re.sub(r"'/\S+'", "the folder", last).replace("|", "/")[:100].strip()


def tried_engine(model_type: str) -> dict[str, str]:
    """Check an architecture; return the cells `engine` and `adapter` of its row."""
    engine = _try(model_type, "weights")
    adapter = _try(model_type, "adapter") if engine == "right" else ""
    return {"engine": engine, "adapter": adapter}


def _try(model_type: str, what: str) -> str:
    """Check in a process of its own; return the result in a few words."""
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "models.engine_check", model_type, what],
            cwd=_TOOLS,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "does not run (no result in 300 s)"
    lines = ended.stdout.splitlines()
    if ended.returncode != 0 or not lines:
        printed = ended.stdout + ended.stderr
        refusals = [refusal for message, refusal in _REFUSALS.items() if message in printed]
        return f"refused ({refusals[0]})" if refusals else f"does not run ({_reason(printed)})"
    found = json.loads(lines[-1])
    wrong = [part for part, difference in found.items() if difference > _TOLERANCE]
    return f"wrong when {wrong[0]}: {found[wrong[0]]:.0e} nats" if wrong else "right"


def page(verdicts: Iterable[Verdict]) -> str:
    """Return the text of docs/models.md."""
    rows = sorted(
        verdicts,
        key=lambda v: (list(Result).index(v.result), v.engine != "right", v.model_type),
    )
    counts = ", ".join(f"{sum(v.result is r for v in rows)} {r.value}" for r in Result)
    works = [f"`{each.model_type}`" for each in rows if each.engine == "right"]
    head = _HEAD.format(
        version=transformers.__version__,
        counts=counts,
        num_works=len(works),
        works=textwrap.fill(", ".join(works), width=100, break_on_hyphens=False),
    )
    return "\n".join([head, *map(str, rows), ""])


def engine_cells(text: str) -> dict[str, dict[str, str]]:
    """Return a page's cells on vLLM by model_type, like `tried_engine`."""
    rows = re.findall(r"^\| `(\S+)` \| [^|]* \| ([^|]*) \| ([^|]*) \| [^|]*\|$", text, flags=re.M)
    return {name: {"engine": a.strip(), "adapter": b.strip()} for name, a, b in rows}


_HEAD = """# Models

On a CPU, at tiny sizes, learner and engine were found right for {num_works} kinds of model. The
`model_type` of yours is in its `config.json`:

{works}.

The table lists these first; it also says what the others lack. An architecture that cannot be
trained is refused at the start, with the reason.

## How this was tried

Written by `python tools/models_table.py`; do not edit. Every architecture that transformers
{version} has a causal language model for, built tiny with random weights: {counts}.

- **right**: from a packed row of four sequences, with activation checkpointing where the model has
  it, the learner's log-probabilities equal those of transformers' own logits, one sequence at a
  time, to 1e-5 nats in float32, and so do their gradients, to 1e-4 of a tensor's largest entry.
  Windows are 4 tokens and sequences up to 24; scales, multipliers and soft caps differ from 1;
  dropouts are 0.3 in `config.json`. *Frozen* tensors are loaded, sent to the engine and exported as
  they are, and never trained. One of them is the bias by which a router chooses its experts, which
  the published recipes update from their load. Layers *with a state* (gated delta nets, Mamba, and
  short convolutions) get the sequences of a row one by one, and need `engine.prefix_caching=false`
  and, on a GPU, the packages flash-linear-attention and causal-conv1d, or mamba-ssm: transformers'
  own code for them is slow, and a warning says so.
  Where it says *CPUs only*, a run on GPUs ends at its start, because the kernel there has no sinks
  or soft caps with gradients. `gpt_oss` is only evaluated: vLLM 0.32 does not take its new weights.
- *Text model of a multimodal one*: prompts are text alone, the encoders stay in the export as they
  are in `model.path`, and vLLM does not load them.
- **refused**: the run ends when the learner is built, before weights are loaded or anything is
  generated, with this reason.
- A checkpoint whose `config.json` ties the output layer to the embedding, but which has another
  tensor for it, is refused as well.
- **not tried**: no small configuration was found. The run checks what it can: the kinds of layers,
  the shape of the logits and the names of the checkpoint's tensors.

The third column is vLLM's build for CPUs, in float32 (`--engine`): *right* after loading, after new
weights of the learner, and after an interruption with kept caches, to 1e-4 nats. A type that is
*wrong* or does not run there may be right on a GPU, or at the sizes of published models; the
mismatch check of every step (`mismatch/logprob_abs_mean`) compares both, and skips the step where
they disagree. The fourth column is the same with `lora.sync=adapter`, for adapters on every linear
layer, where the third is right.

Not in this table: `phimoe` and `qwen2_moe` with a sliding window shorter than their context are
refused, because their code applies it by its mask alone; the published ones have none. Routers stay
in evaluation mode, because some sample their experts in training mode (`phimoe`).

## Every architecture

| model_type | learner | vLLM on a CPU | adapters alone | with, or why |
|---|---|---|---|---|"""
