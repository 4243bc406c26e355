"""Models beside the policy: reads what a teacher is, and refuses one that cannot score the
policy's tokens.
"""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedConfig

from april_rl.config import TrainConfig
from april_rl.config.lora import LoraConfig
from april_rl.planning.errors import PreflightError
from april_rl.planning.memory_inputs import Beside
from april_rl.planning.model import max_context_tokens, read_model
from april_rl.planning.sizes import context_length


def read_beside(config: TrainConfig, model: PreTrainedConfig) -> Beside:
    """Return the sizes of the models beside the policy `model`. Raise PreflightError naming
    teacher.path when it is not a model, or cannot score what the policy samples.
    """
    from april_rl.learner.model.model_sizes import model_sizes  # it needs torch

    path = config.teacher.path
    if not path:
        return Beside()
    teacher = read_model(path, key="teacher.path")
    needed, key = context_length(config, is_training=True)
    if (most := max_context_tokens(teacher)) < needed:
        raise PreflightError(
            f"teacher.path={path} reads {most} tokens, and {key} = {needed}: lower it, or choose "
            "another teacher"
        )
    _check_vocabularies(config)
    ours, theirs = (one.get_text_config().vocab_size for one in (model, teacher))
    if theirs < ours:
        raise PreflightError(
            f"teacher.path={path} has {theirs} tokens and the policy {ours}: a teacher has to give "
            "every token of the policy a probability"
        )
    return Beside(teacher=model_sizes(teacher, LoraConfig()))


def _check_vocabularies(config: TrainConfig) -> None:
    """Require that every token of the policy is the same number to the teacher."""
    ours = _vocabulary(config.model.path, key="model.path")
    theirs = _vocabulary(config.teacher.path, key="teacher.path")
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            found = f"is {theirs[token]}" if token in theirs else "does not exist"
            raise PreflightError(
                f"teacher.path={config.teacher.path} has another tokenizer than model.path="
                f"{config.model.path}: token {number}, {token!r}, {found} there. A teacher scores "
                "the policy's tokens, so both need one tokenizer"
            )


def _vocabulary(path: str, *, key: str) -> dict[str, int]:
    try:
        return dict(AutoTokenizer.from_pretrained(path).get_vocab())
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PreflightError(f"{key}={path}: cannot load the tokenizer: {reason}") from error
