"""Models beside the policy: reads the sizes of a teacher and a critic, and refuses one that cannot
read the policy's tokens.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import AutoTokenizer, PreTrainedConfig

from april_rl.config import TrainConfig
from april_rl.config.choices import Advantage
from april_rl.config.lora import LoraConfig
from april_rl.errors import PreflightError
from april_rl.start.planning.memory_inputs import Beside
from april_rl.start.planning.model import max_context_tokens, read_model
from april_rl.start.planning.sizes import context_length


def read_beside(config: TrainConfig, model: PreTrainedConfig) -> Beside:
    """Return the sizes of the models beside the policy `model`. Raise PreflightError naming
    teacher.path or critic.path when that is not a model, or a model that cannot read the policy's
    tokens.
    """
    teacher = critic = None
    if config.teacher.path:
        teacher = read_model(config.teacher.path, key="teacher.path")
        _check_vocabularies(config, config.teacher.path, key="teacher.path")
        _check_reads_all(config, teacher, model, key="teacher.path")
    if config.algorithm.advantage == Advantage.gae:
        path = config.critic.path
        critic = read_model(path, key="critic.path") if path else model
        if path:
            _check_vocabularies(config, path, key="critic.path")
        _check_reads_all(config, critic, model, key="critic.path")
    return beside_sizes(teacher=teacher, critic=critic)


def beside_sizes(*, teacher: PreTrainedConfig | None, critic: PreTrainedConfig | None) -> Beside:
    """Return the sizes of the two models; the head of a critic has one row, and no weights are
    tied.
    """
    from april_rl.training.learner.model.model_sizes import model_sizes  # it needs torch

    beside = Beside() if teacher is None else Beside(teacher=model_sizes(teacher, LoraConfig()))
    if critic is None:
        return beside
    sizes, text = model_sizes(critic, LoraConfig()), critic.get_text_config()
    head = text.vocab_size * text.hidden_size
    num_parameters = sizes.num_parameters - (0 if text.tie_word_embeddings else head)
    return beside._replace(
        critic=replace(
            sizes,
            num_parameters=num_parameters,
            num_trained=num_parameters,
            root_parameters=sizes.root_parameters - head,
            embedding_unit=head,
        )
    )


def _check_reads_all(
    config: TrainConfig, beside: PreTrainedConfig, model: PreTrainedConfig, *, key: str
) -> None:
    """Require that a model knows every token of the policy, and reads the longest sequence."""
    needed, setting = context_length(config, is_training=True)
    if (most := max_context_tokens(beside)) < needed:
        raise PreflightError(
            f"{key}: the model reads at most {most} tokens, and {setting} = {needed}: lower these "
            "settings, or choose another model"
        )
    ours, theirs = (one.get_text_config().vocab_size for one in (model, beside))
    if theirs < ours:
        raise PreflightError(
            f"{key}: the model has a vocabulary of {theirs} tokens, and the policy has {ours}: it "
            "must read every token of the policy, so choose another model"
        )


def _check_vocabularies(config: TrainConfig, path: str, *, key: str) -> None:
    """Require that every token has the same number in the policy and in the model at `path`."""
    ours = _vocabulary(config.model.path, key="model.path")
    theirs = _vocabulary(path, key=key)
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            found = f"is {theirs[token]}" if token in theirs else "does not exist"
            raise PreflightError(
                f"{key}={path} has another tokenizer than model.path={config.model.path}: token "
                f"{number}, {token!r}, {found} there. It reads the policy's tokens, so both need "
                "one tokenizer"
            )


def _vocabulary(path: str, *, key: str) -> dict[str, int]:
    try:
        return dict(AutoTokenizer.from_pretrained(path).get_vocab())
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PreflightError(f"{key}={path}: cannot load the tokenizer: {reason}") from error
