"""In a run's controller: write at the end which heavy parts it has loaded, into the file that
LOADED_FILE names. Python imports this module by its name at every start.
"""

import atexit
import os
import sys
from pathlib import Path


def write_loaded() -> None:
    """Write the line in the controller only: other processes have another main module."""
    spec = sys.modules["__main__"].__spec__
    if spec is None or spec.name != "april_rl.train":
        return
    cuda = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
    line = f"torch {'torch' in sys.modules}, vllm {'vllm' in sys.modules}, cuda {cuda}"
    Path(os.environ["LOADED_FILE"]).write_text(line, encoding="utf-8")


if "LOADED_FILE" in os.environ:
    atexit.register(write_loaded)
