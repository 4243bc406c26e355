"""TRL's GRPOTrainer on the tiny policy, as a program: `grpo_run.py SETTINGS`, JSON with

`steps`, `folder`, `over_sampling_factor` (null: TRL alone), `refill`, `resume`, `chat` and `grpo`,
further arguments of GRPOConfig. It prints one line of JSON: the log, and for each batch its rows,
tokens and log-probabilities.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}

import torch
import vllm.model_executor.layers.utils as layers
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import april_rl.tiny
from april_rl.trl import TrlError, with_partial_rollouts

FOLDER = Path(april_rl.tiny.__file__).parent


def keep_weights(layer, remove_weight):  # noqa: ARG001
    """Leave the weights of linear layers as they are: vLLM's CPU build packs them, and TRL's sync
    could not replace them.
    """
    layer.cpu_linear = torch.nn.functional.linear


def right(completions, answer, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.split("=")[-1].strip() == a) for text, a in zip(texts, answer, strict=True)]


def even(completions, **_):
    """Differ between samples, so that there is something to learn from."""
    return [len(str(completion)) % 2 for completion in completions]


def main(settings):
    layers.dispatch_cpu_unquantized_gemm = keep_weights
    lines = (FOLDER / "problems" / "train.jsonl").read_text().splitlines()[:32]
    rows = [json.loads(line) | {"number": number} for number, line in enumerate(lines)]
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "policy", padding_side="left")
    if settings.get("chat"):
        rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    batches = []

    def noted(completions, number, completion_ids, **_):
        batches.append({"rows": number, "tokens": completion_ids})
        return [0.0] * len(completions)

    args = {
        "output_dir": settings["folder"],
        "use_cpu": True,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 48,
        "learning_rate": 1e-4,
        "max_steps": settings["steps"],
        "logging_steps": 1,
        "report_to": "none",
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 512,
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_importance_sampling_mode": "token_truncate",
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = GRPOTrainer(
        model=str(FOLDER / "policy"),
        reward_funcs=[right, even, noted],
        args=GRPOConfig(**(args | settings.get("grpo", {}))),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]),
        processing_class=tokenizer,
    )
    factor = settings.get("over_sampling_factor")
    if factor is not None:
        try:
            with_partial_rollouts(
                trainer, over_sampling_factor=factor, refill=settings.get("refill", True)
            )
        except TrlError as error:
            print(json.dumps({"refused": str(error)}))
            return
    trainer.train(resume_from_checkpoint=settings.get("resume"))
    print(json.dumps({"log": trainer.state.log_history, "batches": batches}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
