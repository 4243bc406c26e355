"""Adapters in vLLM's own LoRA layers; peft's forward pass is the reference."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from small_engine import request_of, small_engine
from tiny_architectures import tiny_config, tiny_model
from tiny_models import write_tiny_qwen3, write_tiny_qwen3_moe
from transformers import AutoModelForCausalLM

from april_rl.config.choices import LoraSync
from april_rl.config.lora import LoraConfig
from april_rl.errors import RunError
from april_rl.training.engine.vllm_engine import VllmEngine
from april_rl.training.rollout.requests import Request
from april_rl.types import Completion

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]

ALONE = LoraConfig(rank=4, alpha=16.0, sync=LoraSync.adapter)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_PROMPT, BUDGET, SLOTS = 40, 40, 8  # a prompt fills a block, which the prefix cache may share


def write_adapter(model: Path, folder: Path, *, seed: int, targets: Sequence[str]) -> Path:
    """Write random adapters of `model` with peft itself."""
    torch.manual_seed(seed)
    config = PeftConfig(r=ALONE.rank, lora_alpha=16, target_modules=[*targets])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    write_tiny_qwen3(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    return [
        write_adapter(model, model.parent / f"adapter_{seed}", seed=seed, targets=TARGETS)
        for seed in range(2)
    ]


@pytest.fixture(scope="module")
def only_engine(model: Path) -> VllmEngine:
    sizes = {"max_model_len": NUM_PROMPT + BUDGET, "max_num_seqs": SLOTS}
    return small_engine(model, **sizes, keeps_parked=True, stop_tokens=(), lora=ALONE)


@pytest.fixture
def engine(only_engine: VllmEngine) -> Iterator[VllmEngine]:
    yield only_engine
    only_engine.abort()
    only_engine.release_parked()


def load(engine: VllmEngine, folder: Path) -> None:
    engine.load_adapter(folder, policy_version=engine.policy_version + 1)


def request(prompt_id: int, so_far: Sequence[int] = ()) -> Request:
    prompt = tuple(5 + (prompt_id * 31 + i * 7) % 80 for i in range(NUM_PROMPT))
    return request_of(prompt_id, prompt, so_far, budget=BUDGET, seed=1000 + prompt_id)


def whole(engine: VllmEngine) -> list[Completion]:
    tick = engine.advance([request(i) for i in range(6)], slots=SLOTS, max_steps=10_000)
    return sorted(tick.finished, key=lambda each: each.sample_id)


@torch.no_grad()
def difference(model: Path, adapter: Path, sampled: Sequence[Completion]) -> float:
    """Return the largest |engine - peft| in nats."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, adapter).eval()
    worst = 0.0
    for completion in sampled:
        prompt = request(completion.sample_id.prompt_id).prompt_token_ids
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        logprobs = adapted(input_ids=ids).logits[0, NUM_PROMPT - 1 : -1].log_softmax(-1)
        own = logprobs.gather(-1, ids[0, NUM_PROMPT:, None])[:, 0]
        worst = max(worst, (own - torch.tensor(completion.logprobs)).abs().max().item())
    return worst


def test_each_adapter_replaces_the_last_one_even_in_the_prefix_cache(engine, model, adapters):
    """The prompts are the same each time. Fails when vLLM keeps an old adapter with the same
    number, or the cache of a prompt that an old adapter has computed.
    """
    for own, other in (adapters, adapters[::-1], adapters):
        load(engine, own)
        sampled = whole(engine)
        assert difference(model, own, sampled) < 1e-4
        assert difference(model, other, sampled) > 0.1


def test_kept_samples_continue_with_the_next_adapter(engine, adapters, tmp_path):
    """The same adapter from another folder changes nothing, while another adapter does; neither
    needs a prefill. Fails when a parked sample keeps the adapter with which it began.
    """
    again = tmp_path / "again"
    again.symlink_to(adapters[0])
    load(engine, adapters[0])
    expected = whole(engine)
    for later, is_same in ((again, True), (adapters[1], False)):
        load(engine, adapters[0])
        prompts = [request(i) for i in range(6)]
        assert not engine.advance(prompts, slots=SLOTS, max_steps=25).finished
        first = sorted(engine.abort(), key=lambda each: each.sample_id)
        load(engine, later)
        on = [request(c.sample_id.prompt_id, c.token_ids) for c in first]
        tick = engine.advance(on, slots=SLOTS, max_steps=10_000)
        rest = sorted(tick.finished, key=lambda each: each.sample_id)
        assert tick.prefilled_tokens == 0
        for begun, ended, one in zip(first, rest, expected, strict=True):
            assert (begun.logprobs + ended.logprobs == one.logprobs) is is_same


def test_only_the_chosen_layers_become_lora_layers(model, tmp_path):
    """In vLLM, q_proj is a part of one layer. Fails when a layer without an adapter changes."""
    lora = LoraConfig(
        rank=4, alpha=16.0, sync=LoraSync.adapter, target_modules=["self_attn.q_proj", "down_proj"]
    )
    sizes = {"max_model_len": NUM_PROMPT + BUDGET, "max_num_seqs": SLOTS}
    engine = small_engine(model, **sizes, stop_tokens=(), lora=lora)
    adapter = write_adapter(model, tmp_path, seed=5, targets=["q_proj", "down_proj"])
    load(engine, adapter)
    assert difference(model, adapter, whole(engine)) < 1e-4


def test_layers_that_vllm_does_not_know_by_their_name_are_refused(tmp_path):
    """vLLM splits GLM-4's gate_up_proj into gate_proj and up_proj. Fails when vLLM's error ends the
    run without a remedy.
    """
    config = tiny_config("glm4", head_dim=32, hidden_size=128)
    tiny_model(config).save_pretrained(tmp_path / "model")
    sizes = {"max_model_len": 64, "max_num_seqs": 4}
    engine = small_engine(tmp_path / "model", **sizes, stop_tokens=(), lora=ALONE)
    adapter = write_adapter(tmp_path / "model", tmp_path / "a", seed=0, targets=["gate_up_proj"])
    with pytest.raises(RunError, match=r"set lora\.sync=merged"):
        load(engine, adapter)


def test_experts_are_refused_on_a_cpu(tmp_path):
    """Fails when vLLM chooses a kernel that does not exist and the run ends at its first token."""
    write_tiny_qwen3_moe(tmp_path)
    with pytest.raises(RunError, match=r"has experts.*set lora\.sync=merged"):
        small_engine(tmp_path, max_model_len=64, max_num_seqs=4, lora=ALONE)
