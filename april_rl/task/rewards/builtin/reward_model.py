"""`reward_model`: the score of a sequence classifier with one label.

Legend: [B] texts of a batch, [L] tokens of its longest text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from april_rl.task.rewards.builtin.questions import messages_of, text_of, with_question
from april_rl.task.rewards.loading import Reward, RewardContext

CHAT, CONCAT = "chat", "concat"
THINK_END = "</think>"
PLACEHOLDER = re.compile(r"\{(prompt|response)\}")
CONTROL = re.compile(r"<\|[^|\s]+\|>")  # markers of turns in chat templates


def build(
    context: RewardContext,  # noqa: ARG001
    *,
    path: str,
    prompt_column: str | None = None,
    **args: Any,  # noqa: ANN401
) -> Reward:
    """Load the model and return the reward function; `args` are those of load_reward_model.

    `prompt_column` is the data column with the question, a text or messages; null: the prompt as
    the policy gets it. Raise ValueError or TypeError for invalid arguments.
    """
    model = load_reward_model(path=path, **args)
    return with_question(model.score, prompt_column, last_failure=lambda: model.last_failure)


@dataclass(slots=True, kw_only=True)
class RewardModel:
    """A loaded classifier, one in each reward process; `score` is its reward function."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int | None  # padding token in the model's own configuration
    batch_size: int
    max_tokens: int
    template: str
    sigmoid: bool
    last_failure: str = ""  # why a response had no score

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        answers: Sequence[str],  # noqa: ARG002
        *,
        questions: Sequence[object] | None = None,
    ) -> list[float | None]:
        """Return the score of each response: the logit, or with `sigmoid` a value in (0, 1).

        `template` makes the text. `chat` puts the question (`questions`, texts or messages) and the
        response into the chat template of the model's tokenizer. `concat` takes the prompt as the
        policy gets it and the whole response, for a model with the policy's chat template. Anything
        else contains {prompt} and {response}. Except with `concat`, a response is its text after
        the last `</think>`.

        A text of more than `max_tokens` tokens or a score that is not finite gives None, and
        `last_failure` says why; nothing is truncated. Raise ValueError when `chat` would put a
        prompt that is rendered already into a second template.
        """
        shown = prompts if questions is None else questions
        if self.template == CHAT and questions is None:
            self._check_not_rendered(prompts)
        asked = zip(shown, responses, strict=True)
        token_ids = [self._token_ids(question, response) for question, response in asked]
        fitting = [i for i, ids in enumerate(token_ids) if len(ids) <= self.max_tokens]
        if len(fitting) < len(token_ids):
            longest = max(map(len, token_ids))
            self.last_failure = f"{longest} tokens are more than args.max_tokens={self.max_tokens}"
        scores: list[float | None] = [None] * len(token_ids)
        for batch in _batches(sorted(fitting, key=lambda i: len(token_ids[i])), self.batch_size):
            for i, value in zip(batch, self._forward([token_ids[i] for i in batch]), strict=True):
                scores[i] = self._score_of(value)
        return scores

    def _token_ids(self, question: object, response: str) -> list[int]:
        if self.template == CONCAT:
            return self._encode(text_of(question) + response, special=False)
        answer = response.rpartition(THINK_END)[2].strip()
        if self.template == CHAT:
            messages = [*messages_of(question), {"role": "assistant", "content": answer}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            return self._encode(str(text), special=False)
        filled = {"prompt": text_of(question), "response": answer}
        text = PLACEHOLDER.sub(lambda match: filled[match[1]], self.template)
        return self._encode_once(text)

    def _encode_once(self, text: str) -> list[int]:
        """Return the tokens of a text with the start and end that the tokenizer adds, unless the
        text has them already.
        """
        own, whole = self._encode(text, special=False), self._encode(text, special=True)
        num = len(own)
        start = next((i for i in range(len(whole)) if whole[i : i + num] == own), None)
        if start is None:
            return whole
        before, after = whole[:start], whole[start + num :]
        is_begun, is_ended = own[:start] == before, own[num - len(after) :] == after
        return [*([] if is_begun else before), *own, *([] if is_ended else after)]

    def _encode(self, text: str, *, special: bool) -> list[int]:
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return token_ids

    @torch.inference_mode()
    def _forward(self, token_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return the logits of a batch [B], padded on the right.

        The model takes the logit at the last token that is not `config.pad_token_id`. Without one
        of its own that is the last token of a text, so a batch is filled with a token that none of
        its texts ends in.
        """
        longest = max(map(len, token_ids))
        pad = self.pad_token_id
        if pad is None:
            last_tokens = {ids[-1] for ids in token_ids if ids}
            pad = next(token for token in count() if token not in last_tokens)
            self.model.config.get_text_config().pad_token_id = pad
        padded = [[*ids, *[pad] * (longest - len(ids))] for ids in token_ids]
        mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in token_ids]
        device = self.model.device
        logits = self.model(
            input_ids=torch.tensor(padded, device=device),  # [B, L]
            attention_mask=torch.tensor(mask, device=device),
        ).logits
        values: list[float] = logits[:, 0].float().tolist()
        return values

    def _score_of(self, logit: float) -> float | None:
        if not math.isfinite(logit):
            self.last_failure = f"the model's score is {logit}"
            return None
        return (1.0 + math.tanh(logit / 2.0)) / 2.0 if self.sigmoid else logit

    def _check_not_rendered(self, prompts: Iterable[str]) -> None:
        for prompt in prompts:
            found = CONTROL.search(prompt)
            if found:
                raise ValueError(
                    f"args.template=chat: the prompt contains {found[0]}, so it is in the policy's "
                    "chat template already; name the data column of the question by prompt_column, "
                    "or set template: concat when the reward model has the policy's chat template"
                )


def load_reward_model(
    *,
    path: str,
    device: str = "cpu",
    dtype: str = "auto",
    batch_size: int = 8,
    max_tokens: int = 8192,
    template: str = CHAT,
    sigmoid: bool = False,
) -> RewardModel:
    """Load a classifier with its tokenizer from a folder or the hub, without code from there.

    It needs memory (`user_code.memory_gib`) for its weights and for the libraries (1 GiB with
    torch's CPU build); CUDA reserves much more than a GPU has. Raise ValueError when it has more
    than one label, when its file holds no classification head (a plain language model), or when
    `template` cannot be used.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    if template == CHAT and tokenizer.chat_template is None:
        raise ValueError(
            f"args.template=chat: the tokenizer of {path} has no chat template; give a template "
            "with {prompt} and {response}"
        )
    if template not in (CHAT, CONCAT) and "{response}" not in template:
        raise ValueError("args.template must contain {response}, or be chat or concat")
    model, loaded = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=dtype, output_loading_info=True
    )
    if model.config.num_labels != 1:
        raise ValueError(
            f"{path} has {model.config.num_labels} labels; a reward model must have 1."
        )
    if loaded["missing_keys"]:
        raise ValueError(
            f"{path} does not hold {', '.join(sorted(loaded['missing_keys']))}, so its scores are "
            "random; a reward model must have a trained classification head"
        )
    return RewardModel(
        model=model.eval().to(device),
        tokenizer=tokenizer,
        pad_token_id=_pad_token_id(model),
        batch_size=batch_size,
        max_tokens=max_tokens,
        template=template,
        sigmoid=sigmoid,
    )


def _pad_token_id(model: PreTrainedModel) -> int | None:
    own: int | None = model.config.get_text_config().pad_token_id
    num_tokens = len(model.get_input_embeddings().get_parameter("weight"))
    return own if own is not None and 0 <= own < num_tokens else None


def _batches(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]
