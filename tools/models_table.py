"""A table of the architectures that the learner trains: all of transformers, tried at a tiny size.

python tools/models_table.py            # write docs/models.md; half a minute of CPU

python tools/models_table.py --engine   # and try vLLM with all that are right; an hour

python tools/models_table.py --check    # compare with docs/models.md; exit status 1 if it differs

A tiny random model is saved and loaded as the learner loads it, with activation checkpointing if
the model has it. The log-probabilities of a packed row, and the gradients of their sum, are
compared with those of transformers' own logits, one sequence at a time, in float32 with eager
attention.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
import transformers
from models.page import Result, Verdict, engine_cells, page, tried_engine
from models.tiny_architectures import VOCABULARY, WINDOW, model_types, tiny_config, tiny_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from april_rl.batch.packing import MicroBatch
from april_rl.errors import RunError
from april_rl.learner.mesh import build_mesh
from april_rl.learner.model.architecture import (
    NOT_SUPPORTED,
    empty_model,
    frozen_tensors,
    logit_shape,
)
from april_rl.learner.model.logprobs import LogitShape
from april_rl.learner.model.mixers import has_known_mixers
from april_rl.learner.policy import Policy
from april_rl.learner.row import PackedRow

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
TOLERANCE = 1e-5  # nats
GRADIENT_TOLERANCE = 1e-4  # share of the largest entry of a parameter's gradient
# Share of the largest gradient; smaller gradients are compared as if they were this large.
SMALL_GRADIENT = 1e-2
TEMPERATURE = 0.8
LENGTHS = (7, 24, 3, 13)  # tokens of the sequences of the row
MAX_PARAMETERS = 1_000_000
_CPU = torch.device("cpu")


def judge(model_type: str) -> Verdict:
    """Try one architecture; needs a process group (`group_of_one`)."""
    result, why = _try(model_type)
    return Verdict(model_type=model_type, result=result, why=why)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Create a `torch.distributed` process group with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _try(model_type: str) -> tuple[Result, str]:
    try:
        config = tiny_config(model_type)
        empty = empty_model(config, dtype=torch.float32)
        shape = logit_shape(empty)
    except RunError as refusal:
        return Result.refused, _reason(refusal)
    except Exception as error:  # configurations in transformers may raise anything
        return Result.untried, f"cannot be built from small sizes ({type(error).__name__})"
    if sum(p.numel() for p in empty.parameters()) > MAX_PARAMETERS:
        return Result.untried, "cannot be built small"
    try:
        found = _compare(config, can_recompute=empty.supports_gradient_checkpointing)
    except RunError as refusal:
        return Result.refused, _reason(refusal)
    except ImportError:
        return Result.untried, "transformers needs a package that is not installed"
    if found.logprobs > TOLERANCE:
        return Result.wrong, f"{found.logprobs:.1e} nats"
    if found.gradient > GRADIENT_TOLERANCE:
        return Result.wrong, f"{found.gradient:.1e} of the gradient of {found.parameter}"
    return Result.right, ", ".join(_features(config, empty, shape))


def _reason(refusal: RunError) -> str:
    """Return why the learner refuses, without the model's name."""
    before, _, reason = str(refusal).rpartition(NOT_SUPPORTED)
    return reason if before else f"its checkpoints have another layout ({type(refusal).__name__})"


def _features(config: PreTrainedConfig, empty: PreTrainedModel, shape: LogitShape) -> Iterator[str]:
    """Yield features of this model that a plain transformer does not have."""
    if config.get_text_config() is not config:
        yield "text model of a multimodal one"
    text = empty.config.get_text_config().to_dict()
    if text.get("sliding_window") == WINDOW:
        kinds = text.get("layer_types") or ()
        yield "sliding window" + (" in some layers" if "full_attention" in kinds else "")
    if has_known_mixers(empty):
        yield "layers with a state, one sequence at a time"
    if any(name.endswith("sinks") for name, _ in empty.named_parameters()):
        yield "sinks (CPUs only)"
    if text.get("attn_logit_softcapping"):
        yield "attention has a soft cap (CPUs only)"
    frozen = {name.rpartition(".")[2] for name in frozen_tensors(empty)}
    if frozen:
        yield f"`{'`, `'.join(sorted(frozen))}` frozen"
    if empty.get_output_embeddings().bias is not None:
        yield "logits have a bias"
    if abs(shape.scale - 1) > 1e-6:
        yield "logits are scaled"
    if shape.cap is not None:
        yield "logits have a soft cap"


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """The largest differences between the learner and transformers."""

    logprobs: float  # nats
    gradient: float  # relative, as GRADIENT_TOLERANCE is
    parameter: str  # name of the parameter with that gradient


def _compare(config: PreTrainedConfig, *, can_recompute: bool) -> _Difference:
    model = tiny_model(config)
    rows = _sequences()
    expected = torch.cat([_logprobs(model, row) for row in rows])
    expected.sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        policy = Policy.build(
            Path(folder),
            mesh=build_mesh("cpu", shard_size=0),
            device=_CPU,
            compute_dtype=torch.float32,
            activation_checkpointing=can_recompute,
            temperature=TEMPERATURE,
        )
    found = policy(PackedRow.of(_pack(rows), device=_CPU))[0]
    found.sum().backward()
    gradients, expected_gradients = _gradients(policy), _gradients(model)
    least = SMALL_GRADIENT * max(g.abs().max().item() for g in expected_gradients.values())
    distances = {
        name: _distance(gradients.get(name), expected_gradients.get(name), least=least)
        for name in gradients.keys() | expected_gradients.keys()
    }
    worst = max(distances, key=distances.__getitem__)
    logprobs = (found - expected).abs().max().item()
    return _Difference(logprobs=logprobs, gradient=distances[worst], parameter=worst)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients of the parameters that have one, by the names of a text model."""
    given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        name.replace("model.language_model.", "model."): (
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        )
        for name, gradient in given.items()
    }


def _distance(found: Tensor | None, expected: Tensor | None, *, least: float) -> float:
    """Return the largest difference of two gradients, relative as GRADIENT_TOLERANCE; None is 0."""
    if found is None or expected is None:
        given = found if expected is None else expected
        assert given is not None
        return given.abs().max().item() / least
    return (found - expected).abs().max().item() / max(expected.abs().max().item(), least)


def _sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def _logprobs(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Return log-probabilities of all tokens but the first, from all logits."""
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].float()
    logprobs = (logits / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(-1, token_ids[1:, None])[:, 0]


def _pack(rows: list[Tensor]) -> MicroBatch:
    """Return one row of all sequences; the first token of each is its prompt."""
    size = sum(LENGTHS)
    is_last = np.zeros(size, np.bool_)
    is_last[np.cumsum(LENGTHS) - 1] = True
    token_ids = torch.cat(rows).numpy()
    floats = np.zeros(size, np.float32)
    return MicroBatch(
        lengths=LENGTHS,
        response_lengths=tuple(n - 1 for n in LENGTHS),
        position_ids=np.concatenate([np.arange(n) for n in LENGTHS]),
        token_ids=token_ids,
        labels=np.roll(token_ids, -1),
        response_mask=~is_last,
        behaviour_logprobs=floats,
        advantages=floats,
        ages=np.zeros(size, np.int32),
        is_comparable=np.zeros(size, np.bool_),
        loss_weights=floats,
    )


def main(arguments: list[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--engine", action="store_true", help="try vLLM again, too")
    parsed = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with group_of_one():
        verdicts = [judge(model_type) for model_type in model_types()]
    cells = engine_cells(PAGE.read_text())
    if parsed.engine:
        right = [each.model_type for each in verdicts if each.result is Result.right]
        cells = {model_type: tried_engine(model_type) for model_type in tqdm(right)}
    verdicts = [replace(each, **cells.get(each.model_type, {})) for each in verdicts]
    written = page(verdicts)
    wrong = [verdict for verdict in verdicts if verdict.result is Result.wrong]
    print(*wrong, sep="\n", file=sys.stderr)
    if parsed.check:
        return int(bool(wrong) or written != PAGE.read_text())
    PAGE.write_text(written)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
