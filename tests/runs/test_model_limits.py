"""Models that vLLM cannot run with new weights or its prefix cache, or whose router cannot be
replayed, are refused at the start.
"""

import pytest
from command_line import refusal
from tiny_architectures import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about tiny configurations


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        # One model is dense, the other samples its experts in its own way.
        ("qwen3", "learner.router_replay=learner: model_type qwen3 has no router"),
        ("phimoe", "learner.router_replay=learner: model_type phimoe has no router"),
        ("gpt_oss", "model_type gpt_oss cannot be trained: vLLM 0.32 keeps its first attention"),
        ("falcon_h1", "engine.prefix_caching=true: model_type falcon_h1 has layers that carry a"),
        ("qwen3_5", "engine.prefix_caching=true: model_type qwen3_5_text has layers that carry a"),
    ],
)
def test_a_model_is_refused_by_its_configuration(model_type, message, task, tmp_path):
    """The weights are empty, so the test fails when a worker starts first."""
    tiny_config(model_type, max_position_embeddings=512).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    replays = ["learner.router_replay=learner", "trainer.num_minibatches=2"]
    own = replays if "router_replay" in message else []
    assert message in refusal(task, tmp_path, f"model.path={tmp_path / 'model'}", *own)
