"""Check vLLM's results for an architecture on a CPU.

    cd tools; python -m models.engine_check MODEL_TYPE WHAT

WHAT is `weights`: a tiny random model is loaded by the engine and sampled from; then the engine
gets the weights of a learner with another model and is sampled from again; then it is interrupted
halfway, keeps its caches, and continues. Or `adapter`: it samples, with an interruption, after a
sync of a learner's adapters alone. Log-probabilities are compared with those of transformers' own
logits. Prints one line of JSON, the largest difference of each part in nats.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from april_rl.config.choices import ComputeDtype, LoraSync
from april_rl.config.engine import EngineConfig
from april_rl.config.lora import LoraConfig
from april_rl.engine.vllm_engine import VllmEngine
from april_rl.learner.mesh import build_mesh
from april_rl.learner.model.lora import write_adapter
from april_rl.learner.policy import Policy
from april_rl.rollout.requests import Request
from april_rl.types import Completion, SampleId
from models.tiny_architectures import VOCABULARY, tiny_config, tiny_model

TEMPERATURE = 0.8
NUM_SAMPLES, NUM_PROMPT, NUM_TOKENS, NUM_BEFORE = 4, 5, 16, 6
# vLLM's kernels on CPUs need heads of at least 32, and experts in multiples of 32.
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "max_window_layers": 4,
    "head_dim": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "max_position_embeddings": 128,
}
# vLLM needs head_dim in config.json, which published models have.
_HEADS_BY_NAME = ("glm4_moe", "minimax_m2", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")
# Keys of a published config.json that the class in transformers does not know.
_PUBLISHED: dict[str, dict[str, object]] = {
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "topk_method": "noaux_tc"},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "hy_v3": {"first_k_dense_replace": 1},
    "solar_open": {"first_k_dense_replace": 1},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_expand": 2},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_expand": 2},
}


def engine_of(folder: Path, lora: LoraConfig | None = None) -> VllmEngine:
    """Start a small engine in float32 that keeps the caches of interrupted samples."""
    return VllmEngine(
        EngineConfig(
            max_batched_tokens=256,
            kv_cache_gib=0.05,
            dtype=ComputeDtype.float32,
            gpu_memory_utilization=0.2,
            cuda_graphs=False,
            async_scheduling=False,
        ),
        model_path=str(folder),
        seed=0,
        temperature=TEMPERATURE,
        max_model_len=64,
        max_num_seqs=NUM_SAMPLES,
        keeps_parked=True,
        sleeps=False,
        stop_tokens=[],
        lora=lora,
    )


def requests() -> list[Request]:
    """Return requests, each with a different prompt."""
    return [
        Request(
            sample_id=SampleId(index, 0),
            prompt_token_ids=tuple(3 + (7 * index + 5 * i) % 90 for i in range(NUM_PROMPT)),
            start=0,
            max_tokens=NUM_TOKENS,
            seed=index,
        )
        for index in range(NUM_SAMPLES)
    ]


def sample_all(engine: VllmEngine, *, interrupted: bool) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities of a sample of each request."""
    parts: list[Sequence[Completion]] = []
    todo = requests()
    if interrupted:
        engine.advance(todo, slots=NUM_SAMPLES, max_steps=NUM_BEFORE)
        parts.append(sorted(engine.abort(), key=lambda each: each.sample_id))
        todo = [continue_after(one, begun) for one, begun in zip(todo, parts[0], strict=True)]
    ended = engine.advance(todo, slots=NUM_SAMPLES, max_steps=1000).finished
    parts.append(sorted(ended, key=lambda each: each.sample_id))
    return [
        ([t for each in of_one for t in each.token_ids], [p for e in of_one for p in e.logprobs])
        for of_one in zip(*parts, strict=True)
    ]


def continue_after(request: Request, begun: Completion) -> Request:
    """Return the request that continues after the tokens of an interrupted one."""
    return Request(
        sample_id=request.sample_id,
        prompt_token_ids=request.prompt_token_ids,
        start=len(begun.token_ids),
        max_tokens=NUM_TOKENS - len(begun.token_ids),
        seed=request.seed,
        parts=(tuple(begun.token_ids),),
    )


@torch.no_grad()
def difference(model: PreTrainedModel, samples: list[tuple[list[int], list[float]]]) -> float:
    """Return the largest |engine - transformers|, nats."""
    model.base_model.do_not_compile = True  # vLLM may have changed its class
    worst = 0.0
    for request, (tokens, logprobs) in zip(requests(), samples, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *tokens]])
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, NUM_PROMPT - 1 : -1]
        own = (logits.float() / TEMPERATURE).log_softmax(-1)
        own = own.gather(-1, ids[0, NUM_PROMPT:, None])[:, 0]
        worst = max(worst, (own - torch.tensor(logprobs)).abs().max().item())
    return worst


def config_of(model_type: str) -> PreTrainedConfig:
    """Return a small configuration that vLLM's kernels support."""
    default = transformers.AutoConfig.for_model(model_type).get_text_config().to_dict()
    sizes: dict[str, object] = {k: size for k, size in _SIZES.items() if default.get(k) is not None}
    if model_type in _HEADS_BY_NAME:
        sizes["head_dim"] = 32
    # Published models have none, and vLLM does not support them.
    if "use_sliding_window" in default:
        sizes |= {"use_sliding_window": False, "layer_types": None}
    sizes |= _PUBLISHED.get(model_type, {})
    return tiny_config(model_type, vocab_size=VOCABULARY, **sizes)


def policy_of(folder: Path, lora: LoraConfig | None = None) -> Policy:
    """Return a learner's policy. Build it before the engine, as in a worker: vLLM may change the
    model's class.
    """
    return Policy.build(
        folder,
        mesh=build_mesh("cpu", shard_size=0),
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
        activation_checkpointing=False,
        temperature=TEMPERATURE,
        lora=lora,
    )


def check_weights(config: PreTrainedConfig, root: Path) -> dict[str, float]:
    """Return the differences as loaded, after a sync of other weights, and with kept caches."""
    models = [tiny_model(config, seed=seed) for seed in (0, 1)]
    for model, name in zip(models, "ab", strict=True):
        model.save_pretrained(root / name)
    policy = policy_of(root / "b")
    engine = engine_of(root / "a")
    found = {"loaded": difference(models[0], sample_all(engine, interrupted=False))}
    engine.load_weights(policy.gather(torch.float32), policy_version=1)
    found["synced"] = difference(models[1], sample_all(engine, interrupted=False))
    found["kept"] = difference(models[1], sample_all(engine, interrupted=True))
    return found


def check_adapter(config: PreTrainedConfig, root: Path) -> dict[str, float]:
    """Return the difference from the model with merged weights, after adapters alone were sent."""
    lora = LoraConfig(rank=4, alpha=8.0, sync=LoraSync.adapter)
    tiny_model(config, seed=0).save_pretrained(root / "base")
    policy = policy_of(root / "base", lora)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    for name in ("adapter", "merged"):
        (root / name).mkdir()
    write_adapter(policy, lora, root / "adapter")
    save_file(dict(policy.gather(torch.float32)), root / "merged" / "model.safetensors")
    shutil.copy(root / "base" / "config.json", root / "merged")
    merged = AutoModelForCausalLM.from_pretrained(root / "merged", attn_implementation="eager")
    engine = engine_of(root / "base", lora)
    engine.load_adapter(root / "adapter", policy_version=1)
    return {"adapter": difference(merged.eval(), sample_all(engine, interrupted=True))}


def main(model_type: str, what: str) -> None:
    """Check one architecture."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    check = {"weights": check_weights, "adapter": check_adapter}[what]
    with tempfile.TemporaryDirectory() as root:
        found = check(config_of(model_type), Path(root))
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM's threads may outlive the interpreter


if __name__ == "__main__":
    main(*sys.argv[1:])
