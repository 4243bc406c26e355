"""TRL's GRPOTrainer for `tools/bench.py step --trl`: `python tools/bench/trl_steps.py JSON`.

Needs requirements/trl.txt. The JSON has `model`, `data`, `folder`, `steps`, `num_groups`,
`group_size`, `max_response_tokens` and `over_sampling_factor` (null: TRL alone). Prints a line of
JSON for each step: seconds, seconds of the rollout, response tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from april_rl.trl import with_partial_rollouts  # it also keeps the weights that vLLM packs on a CPU

_MICRO_BATCH = 16  # sequences of a forward pass


class Steps(TrainerCallback):
    """A callback that prints the duration of each step."""

    def __init__(self) -> None:
        """Start before the first step."""
        self.rollout_s, self.num_tokens = 0.0, 0

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Start the clock of a step."""
        self.began = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Print the line of a step."""
        step_s = time.perf_counter() - self.began
        line = {"step_s": step_s, "rollout_s": self.rollout_s, "tokens": self.num_tokens}
        print(json.dumps(line), flush=True)
        self.rollout_s, self.num_tokens = 0.0, 0

    def timing(
        self, generate: Callable[..., tuple[list[list[int]], Any]]
    ) -> Callable[..., tuple[list[list[int]], Any]]:
        """Return `generate` with its seconds and tokens counted."""

        def time_generate(*args: object, **kwargs: object) -> tuple[list[list[int]], Any]:
            began = time.perf_counter()
            returned = generate(*args, **kwargs)
            self.rollout_s += time.perf_counter() - began
            self.num_tokens += sum(map(len, returned[0]))
            return returned

        return time_generate


def main(settings: dict[str, Any]) -> None:
    """Train, and print the steps."""
    num_samples = settings["num_groups"] * settings["group_size"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=_MICRO_BATCH,
        gradient_accumulation_steps=num_samples // _MICRO_BATCH,
        num_generations=settings["group_size"],
        max_completion_length=settings["max_response_tokens"],
        learning_rate=1e-6,
        max_steps=settings["steps"],
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=1024,
        vllm_gpu_memory_utilization=0.3,
        vllm_importance_sampling_mode="token_truncate",
    )
    with open(settings["data"], encoding="utf-8") as file:
        rows = Dataset.from_list([json.loads(line) for line in file])
    steps = Steps()
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=lambda completions, **_: [float(len(text) % 2) for text in completions],
        args=config,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
        callbacks=[steps],
    )
    if settings["over_sampling_factor"] is not None:
        with_partial_rollouts(trainer, over_sampling_factor=settings["over_sampling_factor"])
    trainer._generate_single_turn = steps.timing(trainer._generate_single_turn)
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
