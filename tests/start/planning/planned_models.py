"""Models, settings and workers for tests of the memory plan."""

from dataclasses import fields, replace
from functools import cache

from source_tree import ROOT
from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from april_rl.config.choices import ComputeDtype
from april_rl.config.engine import EngineConfig
from april_rl.config.lora import LoraConfig
from april_rl.config.schema import LearnerConfig
from april_rl.config.store import recipes
from april_rl.run.supervision.host_memory import WorkerMemory
from april_rl.start.planning.memory_inputs import Beside, MemoryInputs
from april_rl.start.planning.memory_plan import GIB
from april_rl.start.planning.model import read_model
from april_rl.training.learner.model.model_sizes import model_sizes
from april_rl.training.learner.model.sizes import ModelSizes
from april_rl.training.runtime.layout import Layout

GPU = 80 * GIB
PUBLISHED = ROOT / "april_rl" / "lab" / "rehearsal" / "models"
# DeepSeek-R1-Distill-Qwen-1.5B.
R1_DISTILL = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
R1_DISTILL |= {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936}
R1_DISTILL |= {"max_position_embeddings": 131072, "tie_word_embeddings": False}
# Sizes of Qwen3's dense models.
LAYERS = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
MODELS = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "tie_word_embeddings": True},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "tie_word_embeddings": True},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "tie_word_embeddings": False},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}
    | {"num_attention_heads": 64, "tie_word_embeddings": False},
}
# A dense model with tied embeddings, one without, and a mixture of 128 experts.
CONFIGS: dict[str, PreTrainedConfig] = {
    "4B": Qwen3Config(**MODELS["4B"], **LAYERS),
    "8B": Qwen3Config(**MODELS["8B"], **LAYERS),
    "30B-A3B": Qwen3MoeConfig(
        **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
        **{"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        vocab_size=151936,
    ),
}
# Hub models that recipes name; their config.json files are in the package.
HUB = {
    "Qwen/Qwen3.5-4B": "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "zai-org/GLM-4-9B-0414": "zai-org/GLM-4-9B-0414",
    "Qwen/Qwen3-0.6B": "0.6B",
    "Qwen/Qwen3-1.7B": "1.7B",
    "Qwen/Qwen3-4B": "4B",
    "Qwen/Qwen3-8B": "8B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "R1-1.5B",
}
# The recipes of these models. Loading all recipes takes seconds in each process that collects
# tests.
PLANNED = [name for name in recipes() if not name.startswith(("tiny_", "smollm2_", "speedrun"))]
INPUTS = MemoryInputs(
    layout=Layout(device="cuda", num_workers=8, tensor_parallel_size=1),
    learner=LearnerConfig(
        max_tokens=16384, activation_checkpointing=True, compute_dtype=ComputeDtype.bfloat16
    ),
    lora=LoraConfig(),
    engine=EngineConfig(gpu_memory_utilization=0.5, dtype=ComputeDtype.bfloat16),
    has_reference=False,
    beside=Beside(),
    longest_tokens=10000,
    keeps_parked=False,
)


def change(inputs: MemoryInputs, **changes: object) -> MemoryInputs:
    """Return `inputs` with other values for its own fields or the fields of its sections."""
    found: dict[str, object] = {}
    unused = set(changes)
    for name in ("layout", "learner", "lora", "engine"):
        section = getattr(inputs, name)
        keys = {field.name for field in fields(section)} & changes.keys()
        found[name] = replace(section, **{key: changes[key] for key in keys})
        unused -= keys
    return replace(inputs, **found, **{key: changes[key] for key in unused})  # type: ignore[arg-type]


def config_of(name: str) -> PreTrainedConfig:
    """Return the configuration of a model of `HUB` or `MODELS`."""
    published = PUBLISHED / name.replace("/", "--")
    if published.is_dir():
        return read_model(str(published))
    if name == "R1-1.5B":
        return Qwen2Config(**R1_DISTILL)
    return Qwen3Config(**MODELS[name], **LAYERS)


@cache
def sizes_of(name: str, *, rank: int | None = None) -> ModelSizes:
    """Return the sizes of a model of `HUB` or `MODELS` on a GPU, with adapters of this rank."""
    return model_sizes(config_of(name), LoraConfig(rank=rank), is_fused=True)


def worker(node: str, *, free: float = 79 * GIB, host: float = 500 * GIB) -> WorkerMemory:
    return WorkerMemory(
        node_id=node, device_bytes=GPU, free_bytes=int(free), host_free_bytes=int(host)
    )
