"""vLLM's messages about weights are shown even though its log level is ERROR."""

import os
import subprocess
import sys

import pytest

SAYS = """
import april_rl.engine
from vllm.logger import init_logger
loader = init_logger("vllm.model_executor.model_loader.reload.layerwise")
loader.warning("Linear: Failed to load weights")
init_logger("vllm.v1.core").warning("slow")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("level", "others"), [(None, 0), ("WARNING", 1)])
def test_weights_that_were_not_loaded_are_named_once_at_any_level(level, others):
    """Fails when a sync that loads nothing is silent, or a message comes twice."""
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_LOGGING_LEVEL"}
    environment |= {"VLLM_LOGGING_LEVEL": level} if level else {}
    ran = subprocess.run(
        [sys.executable, "-c", SAYS], env=environment, capture_output=True, text=True, timeout=300
    )
    said = ran.stdout + ran.stderr
    assert said.count("Linear: Failed to load weights") == 1, said
    assert said.count("slow") == others, said
