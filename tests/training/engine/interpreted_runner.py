"""vLLM's Model Runner V2, which is made for GPUs, on a CPU through Triton's interpreter."""

import os
from types import SimpleNamespace


def use_runner_of_gpus() -> None:
    """Make vLLM use that runner in this process, with the runner's own sampler, which draws by seed
    and position.
    """
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends

    backends.clear()
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=bool))
    from april_rl.training.engine import device

    def as_it_is(self: object, core: object, *, temperature: float) -> None:
        """Keep vLLM's sampler."""

    device.CpuDevice.attach = as_it_is  # type: ignore[method-assign,assignment]
    device.CpuDevice.with_seed = device.AcceleratorDevice.with_seed  # type: ignore[method-assign,assignment]
