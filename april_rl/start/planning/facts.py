"""The facts from which a run is planned: the machine, and the models that the settings name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import AutoTokenizer, PreTrainedConfig

from april_rl.config import TrainConfig
from april_rl.config.choices import Advantage
from april_rl.config.lora import LoraConfig
from april_rl.errors import PreflightError
from april_rl.start.planning.machine import Machine
from april_rl.start.planning.memory_inputs import Beside
from april_rl.start.planning.model import max_context_tokens, num_heads, read_model
from april_rl.training.learner.model.sizes import ModelSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the config.json of a model says."""

    path: str
    sizes: ModelSizes
    context_tokens: int  # longest sequence that it reads
    num_heads: int  # query heads of a layer
    vocab_size: int

    @classmethod
    def of(cls, path: str, config: PreTrainedConfig, lora: LoraConfig) -> ModelFacts:
        """Return the facts of a config.json, with the adapters of `lora`."""
        from april_rl.training.learner.model.model_sizes import model_sizes  # it needs torch

        return cls(
            path=path,
            sizes=model_sizes(config, lora),
            context_tokens=max_context_tokens(config),
            num_heads=num_heads(config),
            vocab_size=config.get_text_config().vocab_size,
        )

    def vocabulary(self) -> dict[str, int]:
        """Return the number of each token. Raise PreflightError without a tokenizer."""
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

    @property
    def beside(self) -> Beside:
        """Return the sizes of the models beside the policy."""
        return Beside(
            teacher=self.teacher.sizes if self.teacher else None,
            critic=self.critic.sizes if self.critic else None,
        )


def read_facts(config: TrainConfig, machine: Machine, *, trains: bool) -> Facts:
    """Read the model of every path; only the policy's if nothing is trained. Raise PreflightError
    naming a setting whose path is not a model that can be used.
    """
    policy = read_model(config.model.path)
    facts = Facts(machine=machine, policy=ModelFacts.of(config.model.path, policy, config.lora))
    if not trains:
        return facts
    if path := config.teacher.path:
        teacher = ModelFacts.of(path, read_model(path, key="teacher.path"), LoraConfig())
        facts = replace(facts, teacher=teacher)
    if config.algorithm.advantage == Advantage.gae:
        path = config.critic.path or config.model.path
        facts = replace(facts, critic=critic_facts(path, read_model(path, key="critic.path")))
    return facts


def critic_facts(path: str, config: PreTrainedConfig) -> ModelFacts:
    """Return the facts of a critic: its head has one row, and no weights are tied."""
    facts, text = ModelFacts.of(path, config, LoraConfig()), config.get_text_config()
    head = text.vocab_size * text.hidden_size
    num_parameters = facts.sizes.num_parameters - (0 if text.tie_word_embeddings else head)
    sizes = replace(
        facts.sizes,
        num_parameters=num_parameters,
        num_trained=num_parameters,
        root_parameters=facts.sizes.root_parameters - head,
        embedding_unit=head,
    )
    return replace(facts, sizes=sizes)
