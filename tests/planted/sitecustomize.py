"""In a run's worker: raise an exception in vLLM's engine step number FAULT_STEP of a process, once
in a run, whose file FAULT_FILE then exists. Python imports this module by its name at every start.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType

MODULE = "vllm.v1.engine.core_client"


class Planter(MetaPathFinder):
    """Plants the fault into vLLM's module when that is imported."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        executed = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            executed(module)
            plant(module.InprocClient)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def plant(client: type) -> None:
    """Make the engine step fail."""
    computed, steps = client.get_output, count(1)
    step, file = int(os.environ["FAULT_STEP"]), Path(os.environ["FAULT_FILE"])

    def get_output(self: object) -> object:
        if next(steps) == step and not file.exists():
            file.touch()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return computed(self)

    client.get_output = get_output


if "FAULT_STEP" in os.environ:
    sys.meta_path.insert(0, Planter())
