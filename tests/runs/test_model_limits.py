"""Models that vLLM cannot run with new weights or its prefix cache are refused at the start."""

from pathlib import Path

import pytest
from command_line import refusal, write_task
from tiny_architectures import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about tiny configurations


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("gpt_oss", "model_type gpt_oss cannot be trained: vLLM 0.32 keeps its first attention"),
        ("falcon_h1", "engine.prefix_caching=true: model_type falcon_h1 has layers that carry a"),
        ("qwen3_5", "engine.prefix_caching=true: model_type qwen3_5_text has layers that carry a"),
    ],
)
def test_a_model_is_refused_by_its_configuration(model_type, message, task, tmp_path):
    """The weights are empty, so the test fails when a worker starts first."""
    tiny_config(model_type, max_position_embeddings=512).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    assert message in refusal(task, tmp_path, f"model.path={tmp_path / 'model'}")
