"""vLLM's messages about weights are shown even though its log level is ERROR."""

import os
import subprocess
import sys

import pytest

SAYS = """
import os
import torch._inductor.scheduler  # most of vLLM's time: once for both processes
if os.fork():
    os.wait()
    print("by default", flush=True)
else:
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
import april_rl.training.engine
from vllm.logger import init_logger
loader = init_logger("vllm.model_executor.model_loader.reload.layerwise")
loader.warning("Linear: Failed to load weights")
init_logger("vllm.v1.core").warning("slow")
"""


@pytest.mark.slow
def test_weights_that_were_not_loaded_are_named_once_at_any_level():
    """Fails when a sync that loads nothing is silent, or a message comes twice."""
    ran = subprocess.run(
        [sys.executable, "-c", SAYS],
        env={key: value for key, value in os.environ.items() if key != "VLLM_LOGGING_LEVEL"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    at_warning, mark, by_default = ran.stdout.partition("by default")
    assert mark
    for said, others in ((at_warning, 1), (by_default, 0)):
        assert said.count("Linear: Failed to load weights") == 1, said
        assert said.count("slow") == others, said
