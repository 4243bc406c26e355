"""`python -m april_rl certify`: models that compute the same pass, and planted faults fail the
comparison that sees them.
"""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from byte_tokenizer import hf_byte_tokenizer
from tiny_architectures import tiny_config, tiny_model
from tiny_models import character_tokenizer, write_tiny_qwen3, write_tiny_qwen3_moe

from april_rl.__main__ import main
from april_rl.config.store import compose_overrides, to_config
from april_rl.lab.certify.certify import comparisons
from april_rl.task.data.tokenizer import Tokenizer
from april_rl.training.engine import vllm_engine
from april_rl.training.engine.vllm_engine import VllmEngine
from april_rl.training.learner.model.logprobs import LogprobHead
from april_rl.training.learner.policy import Policy
from april_rl.training.learner.row import PackedRow

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]
SMALL = ("rollout.max_response_tokens=12", "engine.kv_cache_gib=0.05", "runtime.threads=1")


def write_hybrid(folder: Path) -> None:
    """Write a model with Mamba beside attention, and a token for each byte."""
    tokenizer = hf_byte_tokenizer()
    config = tiny_config("falcon_h1", vocab_size=len(tokenizer))
    config.max_position_embeddings, config.head_dim = 1024, 32  # what vLLM's CPU kernel takes
    tiny_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def certify(folder: Path, *settings: str) -> tuple[int, dict[str, bool]]:
    """Return the exit status, and whether each comparison passes."""
    output = folder / "certificate"
    chosen = (f"model.path={folder}", f"output={output}", *SMALL, *settings)
    status = main(["certify", *chosen])
    written = json.loads((output / "certificate.json").read_text())
    page = (output / "certificate.html").read_text()
    assert all(f"<td>{row['name']}</td>" in page for row in written["rows"])
    assert not (output / "export").exists()
    return status, {row["name"]: row["passes"] for row in written["rows"]}


@pytest.mark.parametrize(
    ("write", "settings"),
    [
        (write_tiny_qwen3, ()),
        (write_tiny_qwen3, ("lora.rank=4", "lora.sync=adapter", "optimizer.lr=1e-2")),
        (write_tiny_qwen3_moe, ()),
        (write_hybrid, ("engine.prefix_caching=false",)),
    ],
    ids=["dense", "adapter", "experts", "hybrid"],
)
def test_a_model_without_a_fault_passes(write, settings, tmp_path, capsys):
    write(tmp_path)
    status, rows = certify(tmp_path, *settings)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert len(rows) == 13
    assert "all 13 comparisons pass" in printed


CHAT = "<bos>{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
ENDS = {"eos_token_id": [5, 7]}


@pytest.mark.parametrize(
    ("template", "ends", "found"),
    [
        (CHAT, {}, "stops at 1"),
        (CHAT, ENDS, "stops at 1, 5, 7"),  # the template ends a turn with 1
        (None, ENDS, "no stop at <eos> (1)"),
        (f"<bos>{CHAT}", {}, "prompts begin with <bos> twice"),
        (CHAT, {}, "transformers renders other prompts"),
    ],
)
def test_stop_tokens_and_prompts_are_compared_with_the_files(
    template, ends, found, tmp_path, monkeypatch
):
    write_tiny_qwen3(tmp_path)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    if "other prompts" in found:
        text = Tokenizer.chat_text
        monkeypatch.setattr(Tokenizer, "chat_text", lambda *args, **more: text(*args, **more)[:-5])
    chosen = [f"data.template={'chat' if template else 'plain'}", "data.path=builtin:arithmetic"]
    config = to_config(compose_overrides([f"model.path={tmp_path}", *chosen]))
    _, row = islice(comparisons(config, tmp_path, print), 2)
    assert (row.name, row.found) == ("special_tokens", found)
    assert row.passes == found.startswith("stops")


def transposed(patch: pytest.MonkeyPatch) -> None:
    """Send a square matrix the wrong way round."""
    load = VllmEngine.load_weights

    def turned(self, weights, *, policy_version):
        found = ((n, w.T if "layers.1.self_attn.k_proj" in n else w) for n, w in weights)
        load(self, found, policy_version=policy_version)

    patch.setattr(VllmEngine, "load_weights", turned)


def stale(patch: pytest.MonkeyPatch) -> None:
    """Tell the engine the new version, and keep its weights."""

    def load(self, weights, *, policy_version):
        for _ in weights:
            pass
        self._policy_version = policy_version

    patch.setattr(VllmEngine, "load_weights", load)


def norm(patch: pytest.MonkeyPatch) -> None:
    materialise = Policy.materialise

    def scaled(self, *args, **keywords):
        materialise(self, *args, **keywords)
        with torch.no_grad():
            dict(self.named_parameters())["model.layers.1.input_layernorm.weight"].mul_(1.02)

    patch.setattr(Policy, "materialise", scaled)


def rounded(patch: pytest.MonkeyPatch) -> None:
    forward = LogprobHead.forward

    def coarse(self, hidden, labels):
        return forward(self, hidden.bfloat16().to(hidden.dtype), labels)

    patch.setattr(LogprobHead, "forward", coarse)


def shifted(patch: pytest.MonkeyPatch) -> None:
    """Shift the positions of the later tokens of a packed row by one."""
    of = PackedRow.of.__func__

    def late(cls, micro_batch, *, device):
        positions = micro_batch.position_ids.copy()
        positions[micro_batch.lengths[0] + 5 :] += 1
        return of(cls, replace(micro_batch, position_ids=positions), device=device)

    patch.setattr(PackedRow, "of", classmethod(late))


def rotary(patch: pytest.MonkeyPatch) -> None:
    """Let the engine alone use another rotary base."""
    arguments = vllm_engine.engine_args

    def changed(*args, **keywords):
        found = arguments(*args, **keywords)
        found.hf_overrides = {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}
        return found

    patch.setattr(vllm_engine, "engine_args", changed)


@pytest.mark.parametrize(
    ("fault", "row"),
    [
        (transposed, "engine_synced"),
        (rotary, "engine_loaded"),
        (stale, "engine_synced"),
        (norm, "learner"),
        (rounded, "learner"),
        (shifted, "packed"),
    ],
)
def test_a_planted_fault_fails_the_comparison_that_sees_it(fault, row, tmp_path, monkeypatch):
    write_tiny_qwen3(tmp_path)
    fault(monkeypatch)
    status, rows = certify(tmp_path)
    assert status == 1
    assert not rows[row], rows
    assert rows["text"]
