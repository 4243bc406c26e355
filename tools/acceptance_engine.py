"""The pieces of tools/gpu_acceptance.py that drive an engine by hand, each in a process of its own:
`acceptance_engine.py sync|ticks --model FOLDER --json FILE`.

sync: learner and engine of one worker on one device. Steps as a worker makes them, each part timed:
the engine samples, sleeps, the learner updates, the engine wakes, is sent the weights, wakes its
cache. The learning rate is so large that weights the engine did not get show in the mismatch.
ticks: the engine alone. Seconds of a tick and of an abort by the number of samples in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from april_rl.runtime.process_setup import thread_environment

os.environ |= thread_environment(os.cpu_count() or 1)
os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch
from bench_device import copy_bandwidth, pick_device, timed
from bench_modes import CappedLognormal, Prompts
from bench_rows import group_of_one, load_config
from transformers import AutoConfig

from april_rl.algorithm.advantages import ADVANTAGES
from april_rl.assembly.packer import build_packer
from april_rl.config import TrainConfig
from april_rl.config.choices import ComputeDtype
from april_rl.config.engine import EngineConfig
from april_rl.engine.vllm_engine import VllmEngine
from april_rl.learner.learner import Learner
from april_rl.runtime.layout import precision
from april_rl.runtime.worker_parts import build_learner
from april_rl.types import Group, Prompt, Request, Sample, SampleId, ScoredGroup

GROUP_SIZE, TICK_STEPS, NUM_TICKS, PROMPT_TOKENS = 8, 8, 5, 16
_SYNC_LR = 1e-3


def main() -> None:
    """Run the measurement that the command line names and write its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("sync", "ticks"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4, help="steps of sync")
    parser.add_argument("--num-groups", type=int, default=8, help="groups of 8 samples, for sync")
    parser.add_argument("--max-response-tokens", type=int, default=512, help="for sync")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--eager", action="store_true", help="measure ticks without CUDA graphs")
    args = parser.parse_args()
    found = sync(args) if args.what == "sync" else ticks(args)
    args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def start_engine(args: argparse.Namespace, *, slots: int, tokens: int, eager: bool) -> VllmEngine:
    """Return an engine that never ends a response by itself; on CPU its KV cache has 1/4 GiB."""
    return VllmEngine(
        EngineConfig(
            dtype=precision(ComputeDtype.auto, pick_device("auto").type),
            kv_cache_gib=0.25,
            gpu_memory_utilization=0.4,
            cuda_graphs=not eager,
        ),
        model_path=str(args.model),
        seed=0,
        temperature=1.0,
        max_model_len=tokens,
        max_num_seqs=slots,
        keeps_parked=False,
        sleeps=True,
        stop_tokens=(),
    )


def sync(args: argparse.Namespace) -> dict[str, Any]:
    """Return the times of every step, the memory a sleep frees, bytes and bandwidth."""
    device = pick_device("auto")
    settings = (f"optimizer.lr={_SYNC_LR}", f"rollout.group_size={GROUP_SIZE}")
    limits = (f"rollout.max_response_tokens={args.max_response_tokens}", "learner.max_tokens=8192")
    memory = ("learner.activation_checkpointing=true", "learner.offload=all")
    config = load_config(args.model, *settings, *limits, *memory)
    with group_of_one(device):
        found = _steps(args, config, device)
    return {**found, "copy_gb_s": copy_bandwidth(device)}


def _steps(args: argparse.Namespace, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    learner = build_learner(config, device=device.type)
    learner.offload()
    tokens, slots = PROMPT_TOKENS + args.max_response_tokens, args.num_groups * GROUP_SIZE
    engine = start_engine(args, slots=slots, tokens=tokens, eager=True)
    worker = _WorkerByHand(config, learner, engine, device)
    prompts = Prompts(_vocabulary(args.model))
    length_of = CappedLognormal(median_tokens=128, sigma=1.0, max_tokens=args.max_response_tokens)
    steps = [
        worker.step([prompts.take() for _ in range(args.num_groups)], length_of)
        for _ in range(args.steps)
    ]
    return {"steps": steps, "bytes": worker.bytes_sent, "num_tensors": worker.tensors_sent}


class _WorkerByHand:
    """The step of `april_rl.runtime.worker`, with each part timed."""

    def __init__(
        self, config: TrainConfig, learner: Learner, engine: VllmEngine, device: torch.device
    ) -> None:
        self._config, self._learner, self._engine = config, learner, engine
        self._device = device
        hidden_size = AutoConfig.from_pretrained(config.model.path).hidden_size
        self._packer = build_packer(config, num_ranks=1, hidden_size=hidden_size)
        self.bytes_sent = self.tensors_sent = 0  # in the last sync

    def step(self, prompts: Sequence[Prompt], length_of: CappedLognormal) -> dict[str, float]:
        """Return the seconds of every part, the memory freed, and the mismatch."""
        engine, learner = self._engine, self._learner
        started = time.perf_counter()
        groups = sampled(engine, prompts, length_of)
        found = {"rollout_s": time.perf_counter() - started}
        rewards = [group.rewards for group in groups]
        advantages = ADVANTAGES[self._config.algorithm.advantage](rewards)
        batch = self._packer.pack(groups, advantages, policy_version=engine.policy_version)
        awake_bytes = self._free_bytes()
        found["sleep_s"] = self._timed(engine.sleep)
        found["freed_gib"] = (self._free_bytes() - awake_bytes) / 2**30
        started = time.perf_counter()
        metrics = learner.update(batch.of_rank(0)).read()
        found["update_s"] = time.perf_counter() - started
        found["wake_weights_s"] = self._timed(engine.wake_weights)
        found["sync_s"] = self._timed(self._send)
        found["offload_s"] = self._timed(learner.offload)
        found["wake_kv_cache_s"] = self._timed(engine.wake_kv_cache)
        found["left_gib"] = (awake_bytes - self._free_bytes()) / 2**30
        found["mismatch"] = metrics["mismatch/logprob_abs_mean"]
        found["mismatch_max"] = metrics["mismatch/logprob_abs_max"]
        return found

    def _timed(self, call: Callable[[], object]) -> float:
        return timed(call, self._device)

    def _send(self) -> None:
        version = self._engine.policy_version + 1
        self._engine.load_weights(self._counted(), policy_version=version)

    def _counted(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.bytes_sent = self.tensors_sent = 0
        for name, tensor in self._learner.weights():
            self.bytes_sent += tensor.nbytes
            self.tensors_sent += 1
            yield name, tensor

    def _free_bytes(self) -> int:
        """Return the free memory of the device; 0 on CPU, where sleeping frees nothing."""
        return 0 if self._device.type == "cpu" else torch.accelerator.get_memory_info()[0]


def sampled(
    engine: VllmEngine, prompts: Sequence[Prompt], length_of: CappedLognormal
) -> list[ScoredGroup]:
    """Return a group for each prompt; half of the rewards are 1, whatever the responses are."""
    ids = [SampleId(prompt.id, i) for prompt in prompts for i in range(GROUP_SIZE)]
    tokens_of = {prompt.id: prompt.token_ids for prompt in prompts}
    requests = [_request(sample_id, tokens_of[sample_id.prompt_id], length_of) for sample_id in ids]
    tick = engine.advance(
        requests, slots=len(requests), max_steps=length_of.max_tokens + len(requests)
    )
    done = {completion.sample_id: completion for completion in tick.finished}
    rewards = tuple(float(i % 2) for i in range(GROUP_SIZE))
    groups = []
    for prompt in prompts:
        samples = tuple(
            Sample(prompt=prompt, index=i, completions=(done[SampleId(prompt.id, i)],))
            for i in range(GROUP_SIZE)
        )
        groups.append(ScoredGroup(group=Group(prompt=prompt, samples=samples), rewards=rewards))
    return groups


def _request(
    sample_id: SampleId, token_ids: tuple[int, ...], length_of: CappedLognormal
) -> Request:
    return Request(
        sample_id=sample_id,
        prompt_token_ids=token_ids,
        start=0,
        max_tokens=length_of(sample_id),
        seed=GROUP_SIZE * sample_id.prompt_id + sample_id.index,
    )


def ticks(args: argparse.Namespace) -> dict[str, Any]:
    """Return, for each number in flight, the median seconds of a tick and of an abort."""
    tokens = 2 * TICK_STEPS * NUM_TICKS * 2  # more than is ever sampled: no response ends
    started = time.perf_counter()
    engine = start_engine(
        args, slots=max(args.in_flight), tokens=PROMPT_TOKENS + tokens, eager=args.eager
    )
    start_s = time.perf_counter() - started
    prompts = Prompts(_vocabulary(args.model))
    length_of = CappedLognormal(median_tokens=tokens, sigma=0.0, max_tokens=tokens)
    rows = []
    for in_flight in args.in_flight:
        tick_s, abort_s = [], []
        for _ in range(2):  # the first time warms up
            requests = [
                _request(SampleId(prompt.id, 0), prompt.token_ids, length_of)
                for prompt in (prompts.take() for _ in range(in_flight))
            ]
            engine.advance(requests, slots=in_flight, max_steps=TICK_STEPS)  # with the prefill
            done = [
                engine.advance([], slots=in_flight, max_steps=TICK_STEPS) for _ in range(NUM_TICKS)
            ]
            tick_s = [tick.elapsed_s for tick in done]
            started = time.perf_counter()
            engine.abort()
            abort_s = [time.perf_counter() - started]
        row = {"in_flight": in_flight, "tick_s": median(tick_s), "abort_s": abort_s[0]}
        row["tokens_per_s"] = in_flight * TICK_STEPS / row["tick_s"]
        rows.append(row)
    return {"start_s": start_s, "tick_steps": TICK_STEPS, "rows": rows}


def _vocabulary(folder: Path) -> int:
    size: int = AutoConfig.from_pretrained(folder).vocab_size
    return size


if __name__ == "__main__":
    main()
