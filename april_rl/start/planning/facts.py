"""The facts from which a run is planned: the machine, and the models that the settings name. What
needs torch is counted later (`count_models`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from april_rl.config import TrainConfig
from april_rl.config.choices import Advantage
from april_rl.config.lora import LoraConfig
from april_rl.errors import PreflightError
from april_rl.start.planning.machine import Machine
from april_rl.start.planning.memory_inputs import Beside
from april_rl.training.learner.model.sizes import ModelSizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# transformers, which imports torch, is imported where a file is read: a plan needs only values.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts from the config.json of a model."""

    path: str
    model_type: str
    context_tokens: int  # longest sequence that it reads
    num_heads: int  # query heads of a layer
    vocab_size: int

    def vocabulary(self) -> dict[str, int]:
        """Return the number of each token. Raise PreflightError without a tokenizer."""
        from transformers import AutoTokenizer

        try:
            return dict(AutoTokenizer.from_pretrained(self.path).get_vocab())
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise PreflightError(f"{self.path}: cannot load the tokenizer: {reason}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts that do not change during a run; the memory of its workers is measured later."""

    machine: Machine
    policy: ModelFacts
    teacher: ModelFacts | None = None  # in the workers
    critic: ModelFacts | None = None


def read_facts(config: TrainConfig, machine: Machine, *, trains: bool) -> Facts:
    """Read each model's config.json, without `trains` only the policy's; raise PreflightError."""
    facts = Facts(machine=machine, policy=_read(config.model.path, key="model.path"))
    if trains and config.teacher.path:
        facts = replace(facts, teacher=_read(config.teacher.path, key="teacher.path"))
    if trains and config.algorithm.advantage == Advantage.gae:
        path = config.critic.path or config.model.path
        facts = replace(facts, critic=_read(path, key="critic.path"))
    return facts


def _read(path: str, *, key: str) -> ModelFacts:
    from april_rl.start.planning.model import max_context_tokens, num_heads, read_model

    config = read_model(path, key=key)
    return ModelFacts(
        path=path,
        model_type=config.model_type,
        context_tokens=max_context_tokens(config),
        num_heads=num_heads(config),
        vocab_size=config.get_text_config().vocab_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The sizes of the models of a run."""

    policy: ModelSizes
    beside: Beside

    @property
    def num_trained(self) -> int:
        critic = self.beside.critic
        return self.policy.num_trained + (critic.num_trained if critic else 0)


def count_models(facts: Facts, config: TrainConfig) -> Models:
    """Return the sizes of the models; imports torch, and raises UnsupportedModelError."""
    from april_rl.start.planning.model import read_model
    from april_rl.training.learner.model.model_sizes import model_sizes

    teacher, critic, is_fused = facts.teacher, facts.critic, config.learner.fused is True
    return Models(
        policy=model_sizes(read_model(facts.policy.path), config.lora, is_fused=is_fused),
        beside=Beside(
            teacher=model_sizes(read_model(teacher.path), LoraConfig()) if teacher else None,
            critic=critic_sizes(read_model(critic.path), is_fused=is_fused) if critic else None,
        ),
    )


def critic_sizes(config: PreTrainedConfig, *, is_fused: bool = False) -> ModelSizes:
    """Return the sizes of a critic: its head has one row, and no weights are tied."""
    from april_rl.training.learner.model.model_sizes import model_sizes

    text = config.get_text_config()
    sizes = model_sizes(config, LoraConfig(), is_fused=is_fused)
    head = text.vocab_size * text.hidden_size
    num_parameters = sizes.num_parameters - (0 if text.tie_word_embeddings else head)
    return replace(
        sizes,
        num_parameters=num_parameters,
        num_trained=num_parameters,
        root_parameters=sizes.root_parameters - head,
        embedding_unit=head,
    )
