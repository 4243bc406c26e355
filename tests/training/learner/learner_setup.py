"""Set-up of the learner's tests: examples, packed rows, a process group, a reference."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_qwen3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, PreTrainedModel

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import ComputeDtype
from april_rl.config.lora import LoraConfig
from april_rl.config.models_beside import CriticConfig, TeacherConfig
from april_rl.config.schema import LearnerConfig, OptimizerConfig
from april_rl.training.algorithm.losses import LossFunction
from april_rl.training.batch.packing import MicroBatch
from april_rl.training.learner.critic import ActorCritic, Critic
from april_rl.training.learner.learner import Learner
from april_rl.training.learner.mesh import Site, build_mesh
from april_rl.training.learner.objective import Objective
from april_rl.training.learner.policy import Policy
from april_rl.training.learner.row import PackedRow
from april_rl.training.learner.trained_model import TrainedModel

CPU = torch.device("cpu")
TEMPERATURE = 0.8
CLIP_LOW, CLIP_HIGH, TIS_CAP = 0.2, 0.28, 1.3
OPTIMIZER = {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
EPS = 1e-3  # so large that rounding does not decide the direction of a step
MAX_GRAD_NORM = 0.5
PRECISIONS = (ComputeDtype.bfloat16, ComputeDtype.float32)
NO_ADAPTERS = LoraConfig()
ALGORITHM = AlgorithmConfig(clip_low=CLIP_LOW, clip_high=CLIP_HIGH, weight_bounds=[0.0, TIS_CAP])
LENGTHS = [(3, 17), (1, 1), (5, 40), (2, 9), (4, 64), (1, 30)]  # prompt and response tokens


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt and a response with the inputs of its loss."""

    token_ids: tuple[int, ...]
    num_prompt: int
    behaviour_logprobs: np.ndarray  # [R]
    advantage: float | np.ndarray  # or one for each response token [R]
    age: int

    @property
    def num_response(self) -> int:
        return len(self.token_ids) - self.num_prompt


@contextmanager
def group_of_one() -> Iterator[None]:
    """Initialize `torch.distributed` with this process only, on one thread: with matrices this
    small, threads only wait for each other.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(num_threads)


@contextmanager
def record_gradients(model: nn.Module) -> Iterator[list[dict[str, Tensor]]]:
    """Collect the whole gradients of `model` at every optimizer step.

    With one optimizer step for each FSDP unit, collect them at the step of the first trained
    parameter.
    """
    seen: list[dict[str, Tensor]] = []
    first = next(parameter for parameter in model.parameters() if parameter.requires_grad)

    def look(adamw: torch.optim.Optimizer, *_: object) -> None:
        if not any(each is first for group in adamw.param_groups for each in group["params"]):
            return
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
        seen.append({name: grad.clone() for name, grad in whole.items()})

    registered = register_optimizer_step_pre_hook(look)
    yield seen
    registered.remove()


def write_model(folder: Path, *, tied: bool = True, num_layers: int = 3) -> str:
    write_tiny_qwen3(folder, tied=tied, num_layers=num_layers)
    return str(folder)


def make_learner(
    path: str,
    *,
    algorithm: AlgorithmConfig = ALGORITHM,
    teacher: TeacherConfig | None = None,
    lora: LoraConfig = NO_ADAPTERS,
    seed: int = 0,
    device: str = "cpu",
    num_steps: int = 10,
    num_passes: int = 1,
    eps: float = EPS,
    loss: LossFunction | None = None,
    on_forward: Callable[[], None] | None = None,
    beside: Mapping[str, TrainedModel] = MappingProxyType({}),
    **changes: Any,
) -> Learner:
    """Return a float32 learner with the settings of the reference below; `changes` are other
    settings of `learner` and `optimizer`.
    """
    config, optimizer = sections(**changes)
    teacher = teacher or TeacherConfig()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("april_rl.training.learner.optimizer.EPS", eps)
        return Learner(
            config,
            Site.of(config, device=device, on_forward=on_forward),
            optimizer=optimizer,
            lora=lora,
            objective=Objective(algorithm, loss=loss, teacher_weight=teacher.weight),
            model_path=path,
            teacher_path=teacher.path,
            beside=beside,
            temperature=TEMPERATURE,
            seed=seed,
            num_optimizer_steps=num_steps,
            num_passes=num_passes,
        )


def make_actor_critic(
    path: str,
    *,
    critic: CriticConfig,
    num_critic_only_steps: int = 0,
    num_steps: int = 10,
    num_passes: int = 1,
    **changes: Any,
) -> ActorCritic:
    """Return a learner as `make_learner` does, with a critic that starts as the same model."""
    own = {key: changes[key] for key in changes if key not in ("algorithm", "teacher", "lora")}
    config, optimizer = sections(**own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("april_rl.training.learner.optimizer.EPS", EPS)
        beside = Critic(
            critic,
            Site.of(config, device="cpu"),
            model_path=path,
            learner=config,
            optimizer=optimizer,
            num_optimizer_steps=num_steps,
            num_steps_alone=num_critic_only_steps,
        )
    policy = make_learner(
        path,
        num_steps=num_steps - num_critic_only_steps,
        num_passes=num_passes,
        beside={"critic.": beside.trained},
        **changes,
    )
    return ActorCritic(policy, beside, num_passes=num_passes)


def sections(**changes: Any) -> tuple[LearnerConfig, OptimizerConfig]:
    """Return the two sections of the reference's settings, changed."""
    settings = {"compute_dtype": ComputeDtype.float32, "max_grad_norm": MAX_GRAD_NORM, **OPTIMIZER}
    settings |= changes
    of_optimizer = {entry.name for entry in fields(OptimizerConfig)} & settings.keys()
    optimizer = OptimizerConfig(**{key: settings.pop(key) for key in of_optimizer})
    return LearnerConfig(**settings), optimizer


def plain_model(path: str) -> PreTrainedModel:
    """Return the model in transformers, float32, with eager attention and a loop over experts."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


def plain_logprobs(model: PreTrainedModel, example: Example) -> torch.Tensor:
    """Return the log-probabilities of one response [R], computed from all logits of this sequence
    only.
    """
    token_ids = torch.tensor([example.token_ids])
    logits = model(input_ids=token_ids, use_cache=False).logits[0, :-1] / TEMPERATURE
    logprobs = logits.log_softmax(-1).gather(-1, token_ids[0, 1:, None])[:, 0]
    return logprobs[example.num_prompt - 1 :]


def make_examples(path: str, *, noise: float, age: int, seed: int = 0) -> list[Example]:
    """Return an example for each of LENGTHS; behaviour logprobs differ from the model's by `noise`
    nats.
    """
    return list(_examples(path, noise, age, seed))


@cache
def _examples(path: str, noise: float, age: int, seed: int) -> tuple[Example, ...]:
    """Load the model of a folder once for all tests that ask for the same examples."""
    rng = np.random.default_rng(seed)
    model = plain_model(path)
    examples = []
    for num_prompt, num_response in LENGTHS:
        bare = Example(
            token_ids=tuple(rng.integers(3, 98, num_prompt + num_response).tolist()),
            num_prompt=num_prompt,
            behaviour_logprobs=np.zeros(0),
            advantage=float(rng.normal()),
            age=age,
        )
        with torch.no_grad():
            logprobs = plain_logprobs(model, bare).numpy()
        behaviour = logprobs + rng.normal(size=num_response, scale=noise)
        examples.append(replace(bare, behaviour_logprobs=behaviour.astype(np.float32)))
    return tuple(examples)


def pack(examples: Sequence[Example], *, total: int) -> MicroBatch:
    """Return a packed row whose response tokens have the weight 1 / total; without examples, return
    the dummy row.
    """
    lengths = tuple(len(e.token_ids) for e in examples) or (2,)
    response_lengths = tuple(e.num_response for e in examples) or (0,)
    size = sum(lengths)
    row: dict[str, np.ndarray] = {
        "token_ids": np.zeros(size, np.int64),
        "labels": np.zeros(size, np.int64),
        "response_mask": np.zeros(size, np.bool_),
        "behaviour_logprobs": np.zeros(size, np.float32),
        "credits": np.zeros(size, np.float32),
        "ages": np.zeros(size, np.int32),
        "is_comparable": np.zeros(size, np.bool_),
        "loss_weights": np.zeros(size, np.float32),
    }
    start = 0
    for example, length in zip(examples, lengths, strict=False):
        predicting = slice(start + example.num_prompt - 1, start + length - 1)
        row["token_ids"][start : start + length] = example.token_ids
        row["labels"][predicting] = example.token_ids[example.num_prompt :]
        row["response_mask"][predicting] = True
        row["behaviour_logprobs"][predicting] = example.behaviour_logprobs
        row["credits"][predicting] = example.advantage
        row["ages"][predicting] = example.age
        row["is_comparable"][predicting] = example.age == 0
        row["loss_weights"][predicting] = 1 / total
        start += length
    positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
    return MicroBatch(
        lengths=lengths, response_lengths=response_lengths, position_ids=positions, **row
    )


def pack_minibatch(bins: Sequence[Sequence[Example]]) -> list[MicroBatch]:
    """Return one micro-batch per bin, with weights over all bins."""
    total = num_tokens(bins)
    return [pack(bin_, total=total) for bin_ in bins]


def num_tokens(bins: Sequence[Sequence[Example]]) -> int:
    return sum(e.num_response for bin_ in bins for e in bin_)


def plain_update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    minibatches: Sequence[Sequence[Example]],
    *,
    ratio: str = "proximal",
    num_passes: int = 1,
    entropy_weight: float = 0.0,
    teacher: PreTrainedModel | None = None,
    teacher_weight: float = 0.0,
    max_grad_norm: float = MAX_GRAD_NORM,
) -> list[float]:
    """Do the update in plain torch, one sequence at a time; return the gradient norms."""
    with torch.no_grad():
        start = [[plain_logprobs(model, e) for e in examples] for examples in minibatches]
    norms = []
    for examples, proximals in num_passes * list(zip(minibatches, start, strict=True)):
        optimizer.zero_grad()
        total = num_tokens([examples])
        for example, proximal in zip(examples, proximals, strict=True):
            behaviour = torch.from_numpy(example.behaviour_logprobs)
            anchor = proximal if ratio == "proximal" else behaviour
            weight = torch.exp(anchor - behaviour).clamp(max=TIS_CAP)
            logprobs = plain_logprobs(model, example)
            r = torch.exp(logprobs - anchor)
            clipped = r.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            advantages = torch.zeros_like(proximal) + torch.as_tensor(example.advantage)
            if teacher is not None:
                with torch.no_grad():
                    teacher_logprobs = plain_logprobs(teacher, example)
                advantages = advantages + teacher_weight * (teacher_logprobs - proximal)
            gain = torch.minimum(r * advantages, clipped * advantages)
            bonus = entropy_weight * logprobs**2 / 2
            ((weight * (bonus - gain)).sum() / total).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        norms.append(norm.item())
        optimizer.step()
    return norms


def build_policy(path: str | Path, *, shard_size: int | None = None, **options: Any) -> Policy:
    settings = {"activation_checkpointing": 0.0, "temperature": TEMPERATURE} | options
    dtype, fused = settings.pop("compute_dtype", torch.float32), settings.pop("fused", False)
    mesh, device = build_mesh("cpu", shard_size=shard_size), settings.pop("device", CPU)
    return Policy.build(Path(path), Site(mesh, device, dtype, fused, None), **settings)


def check_gradients(policy: Policy, path: str) -> None:
    """Check that a packed row has the gradients of plain torch, one sequence after another."""
    examples, model = make_examples(path, noise=0.0, age=0), plain_model(path)
    for example in examples:
        (plain_logprobs(model, example).sum() * example.advantage).backward()
    row = PackedRow.of(pack(examples, total=1), device=CPU)
    (policy(row)[0] * row.credits).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: p.grad.full_tensor() for name, p in policy.named_parameters()}
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert (grad - expected[name]).norm() < 1e-5 * expected[name].norm(), name


def rewrite(path: str, target: Path, **changes: Tensor | None) -> str:
    """Write a copy of the checkpoint with some tensors replaced, added, or left out (None)."""
    tensors = {**load_file(Path(path, "model.safetensors")), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, target / "model.safetensors")
    (target / "config.json").write_text(Path(path, "config.json").read_text())
    return str(target)


def plain_adamw(model: PreTrainedModel) -> torch.optim.AdamW:
    """Return AdamW with the settings of `make_learner`, without weight decay for norms
    and biases.
    """
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, eps=EPS, **OPTIMIZER)


def learner_logprobs(learner: Learner, examples: Sequence[Example]) -> torch.Tensor:
    learner.reload()
    row = PackedRow.of(pack(examples, total=1), device=learner._device)
    with torch.no_grad():
        return learner._policy(row)[0]


def all_plain_logprobs(model: PreTrainedModel, examples: Sequence[Example]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([plain_logprobs(model, e) for e in examples])
