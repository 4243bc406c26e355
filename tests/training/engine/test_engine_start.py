"""The error of an engine that cannot be built says which setting to change."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_engine import small_engine
from tiny_architectures import tiny_config, tiny_model
from tiny_models import EOS_ID, write_tiny_qwen3, write_tiny_qwen3_moe

from april_rl.errors import RunError
from april_rl.task.data.stop_tokens import stop_token_ids
from april_rl.training.engine.core import lacks_memory, start_core

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine]


@pytest.mark.parametrize(
    ("error", "is_lack"),
    [
        (torch.OutOfMemoryError("of a device"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (
            ValueError("Free memory on device cuda:0 (9/80 GiB) on startup is less than desired"),
            True,
        ),
        (ValueError("Cannot auto-fit max_model_len: not enough GPU memory available"), True),
        (ValueError("weights (70 GiB) exceed the desired GPU memory utilization (0.5)"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("unsupported memory format option Preserve"), False),
        (ValueError("gpu_memory_utilization must be a number"), False),
        (ValueError("shared memory name too long"), False),
    ],
)
def test_a_lack_of_memory_is_distinguished_from_messages_that_mention_memory(
    error, is_lack
) -> None:
    """Fails when any error that mentions memory is reported as a lack of it, without a
    traceback.
    """
    assert lacks_memory(error) is is_lack


def test_experts_that_vllm_cannot_report_name_the_setting(tmp_path: Path) -> None:
    """The model runner for CPUs does not report them."""
    write_tiny_qwen3_moe(tmp_path)
    with pytest.raises(RunError, match=r"learner\.router_replay=engine: vLLM cannot"):
        small_engine(tmp_path, max_model_len=64, max_num_seqs=4, reports_experts=True)


@pytest.mark.parametrize("kv_cache_gib", [1e-5, 100_000.0])
def test_no_room_for_the_kv_cache_names_the_setting(tmp_path: Path, kv_cache_gib: float) -> None:
    write_tiny_qwen3(tmp_path)
    with pytest.raises(RunError, match=r"engine\.kv_cache_gib"):
        small_engine(
            tmp_path,
            max_model_len=64,
            max_num_seqs=4,
            args={"max_num_batched_tokens": 64},
            kv_cache_gib=kv_cache_gib,
        )


class Uninspected(SimpleNamespace):
    """Arguments of a model whose code vLLM cannot import."""

    def create_engine_config(self) -> None:
        raise ValueError("Model architectures ['X'] failed to be inspected. Please check the logs")


without_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is not None, reason="torchvision is installed"
)
NEEDS_TORCHVISION = pytest.raises(RunError, match="imports torchvision, which is not inst")


@without_torchvision
def test_a_model_that_needs_torchvision_in_vllm_says_so() -> None:
    with NEEDS_TORCHVISION:
        start_core(Uninspected(async_scheduling=False, model="m"))  # type: ignore[arg-type]


@pytest.mark.soak
@without_torchvision
def test_vllms_message_about_such_a_model_has_the_words_we_search_for(tmp_path: Path) -> None:
    tiny_model(tiny_config("qwen3_5_text")).save_pretrained(tmp_path)
    with NEEDS_TORCHVISION:
        small_engine(tmp_path, max_model_len=64, max_num_seqs=4, stop_tokens=[])


def test_without_a_generation_config_the_end_token_comes_from_the_tokenizer(
    tmp_path: Path,
) -> None:
    write_tiny_qwen3(tmp_path)
    assert stop_token_ids(str(tmp_path)) == [EOS_ID]
    (tmp_path / "generation_config.json").unlink()
    assert stop_token_ids(str(tmp_path)) == [EOS_ID]


def test_several_end_tokens_are_all_taken(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1, 7]}')
    assert stop_token_ids(str(tmp_path)) == [1, 7]
