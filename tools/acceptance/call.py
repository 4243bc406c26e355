"""Call one function: `python -m acceptance.call MODULE.FUNCTION ARGUMENTS --json FILE`."""

from __future__ import annotations

import argparse
import json
import os
from importlib import import_module
from pathlib import Path

from april_rl.run.supervision.host_memory import allocator_environment
from april_rl.training.runtime.process_setup import thread_environment

# This must happen before torch is imported.
os.environ |= thread_environment(os.cpu_count() or 1)
os.environ |= allocator_environment(os.environ)  # as in a run
os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def main() -> None:
    """Call the function with the arguments of the JSON text and write what it returns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function")
    parser.add_argument("arguments", type=json.loads)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    module, _, name = args.function.partition(".")
    found = vars(import_module(f"acceptance.{module}"))[name](**args.arguments)
    args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
