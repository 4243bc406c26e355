"""Render rows to the text and the tokens that the model sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.json_rows import to_storage
from april_rl.task.data.messages import place_of_question
from april_rl.task.data.rows import Row, RowReader
from april_rl.task.data.sources import RowNames
from april_rl.task.data.stop_tokens import special_tokens_after_turn
from april_rl.task.data.tokenizer import Tokenizer, TokenizerError
from april_rl.types import Message

_MARKER = "\N{BLACK DIAMOND}"  # a text that no template contains
EXTRA = "column/"  # prefix of extra columns, so that they cannot clash with ours


class Renderer:
    """Puts instruction and template around a question."""

    def __init__(self, chosen: PromptSetConfig, tokenizer: Tokenizer, names: RowNames) -> None:
        """Raise DataError for contradictory settings, TokenizerError without a template."""
        self._tokenizer, self._names = tokenizer, names
        self._template = "{prompt}" if chosen.template == "plain" else chosen.template
        self._system_prompt = chosen.system_prompt
        self._instruction, self._variables = chosen.instruction, chosen.chat_template_kwargs
        self._has_environment = chosen.environment
        # (role, has calls, is first) of the messages that were tried.
        self._kinds_tried: set[tuple[str, bool, bool]] = set()
        self.is_chat = chosen.is_chat
        # If the model's turn has not begun, an environment can still add to a chat prompt.
        self.begins_turn = not (self.is_chat and chosen.environment)
        if self.is_chat:
            tokenizer.check_chat(chosen.chat_template_kwargs)
            return
        for setting, value in (
            ("system_prompt", chosen.system_prompt),
            ("chat_template_kwargs", chosen.chat_template_kwargs),
        ):
            if value:
                raise DataError(
                    f"data.{setting} has no effect with data.template={chosen.template}; "
                    "write its text into data.template, around {prompt}"
                )

    def text(self, row: Row, place: int) -> str:
        """Return the text the model gets for a row; raises DataError naming the row."""
        if not self.is_chat:
            return self._plain_text(row, place)
        messages, begins_turn = self._messages(row, place), self.begins_turn
        if self._has_environment and messages[-1]["role"] != "user":
            raise DataError(
                f"{self._names.name(place)}: the last message is from the {messages[-1]['role']}; "
                "with data.environment=true it must be from the user"
            )
        try:
            text = self._tokenizer.chat_text(messages, self._variables, begins_turn=begins_turn)
            self._check_written(messages, text, begins_turn=begins_turn)
        except TokenizerError as error:
            raise DataError(f"{self._names.name(place)}: {error}") from error
        return text

    def _check_written(self, messages: list[Message], text: str, *, begins_turn: bool) -> None:
        """Raise TokenizerError if the chat template ignores a message or its tool calls: the text
        then stays the same when they change. Each kind of message is tried once.
        """
        for place, message in enumerate(messages):
            kind = (message["role"], "tool_calls" in message, place == 0)
            if kind in self._kinds_tried:
                continue
            self._kinds_tried.add(kind)
            changed = {**message, "content": f"{message['content']} {_MARKER}"}
            what = f"messages of the {message['role']}"
            if changed.pop("tool_calls", None):
                changed["content"], what = message["content"], "tool_calls"
            others = [*messages[:place], changed, *messages[place + 1 :]]
            try:
                again = self._tokenizer.chat_text(others, self._variables, begins_turn=begins_turn)
            except TokenizerError:  # the template needs the part that was changed
                continue
            if again == text:
                raise TokenizerError(
                    f"the chat template leaves out {what} (message {place + 1}); use rows without "
                    "them, or a model.path whose template writes them"
                )

    def name(self, place: int) -> str:
        return self._names.name(place)

    def _messages(self, row: Row, place: int) -> list[Message]:
        if isinstance(row.prompt, str):
            messages: list[Message] = [{"role": "user", "content": row.prompt}]
        else:
            messages = list(row.prompt)
        if self._instruction:
            at = place_of_question(messages)
            messages[at] = {
                **messages[at],
                "content": self._add_instruction(messages[at]["content"]),
            }
        if not self._system_prompt:
            return messages
        if messages[0]["role"] == "system":
            raise DataError(
                f"{self._names.name(place)}: the row has a system message of its own and "
                "data.system_prompt is set; leave one of them out"
            )
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def _plain_text(self, row: Row, place: int) -> str:
        if not isinstance(row.prompt, str):
            raise DataError(
                f"{self._names.name(place)}: the prompt is a list of chat messages; "
                "agents and a data.template other than chat take text only"
            )
        return self._template.replace("{prompt}", self._add_instruction(row.prompt))

    def _add_instruction(self, question: str) -> str:
        instruction = self._instruction
        return f"{question}\n\n{instruction}" if instruction else question


class BatchTokenizer:
    """The function that `Dataset.map` applies: a batch of values to texts, tokens and answers."""

    def __init__(
        self,
        reader: RowReader,
        renderer: Renderer,
        *,
        tokenizer: Tokenizer,
        places: NDArray[np.int64],
    ) -> None:
        """`places` [prompts] are the rows' indices in the source table."""
        self._reader, self._renderer = reader, renderer
        self._tokenizer, self._places = tokenizer, places
        ends = {*special_tokens_after_turn(tokenizer), *tokenizer.end_ids}
        self._ends = {token_id: tokenizer.show_text([token_id]) for token_id in ends}

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        """Return the columns of a prompt table. The tokenizer adds special tokens for a plain
        template; a chat template writes them itself.
        """
        places = self._places[indices].tolist()
        rows = list(self._reader.rows(batch, places))
        if self._renderer.is_chat:
            for row, place in zip(rows, places, strict=True):
                self._check_question(row, place)
        texts = [self._renderer.text(row, at) for row, at in zip(rows, places, strict=True)]
        encoded = self._tokenizer.encode(texts, add_special_tokens=not self._renderer.is_chat)
        if self._renderer.begins_turn:
            for token_ids, text, place in zip(encoded, texts, places, strict=True):
                self._check_open(token_ids, text, place)
        return {
            "text": texts,
            "token_ids": encoded,
            "answer": [row.answer for row in rows],
            "place": places,
            **{
                f"{EXTRA}{name}": to_storage(batch[name], kind)
                for name, kind in self._reader.columns.items()
            },
        }

    def _check_question(self, row: Row, place: int) -> None:
        """Raise DataError for a question with an end token, which would end its turn."""
        messages = [{"content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        for end in self._ends.values():
            if any(end in message["content"] for message in messages):
                raise DataError(
                    f"{self._renderer.name(place)}: the prompt holds the control token {end}, and "
                    "the chat template would write its turns around it; give the question alone, "
                    "or set data.template=plain if the prompt is rendered already"
                )

    def _check_open(self, token_ids: tuple[int, ...], text: str, place: int) -> None:
        """Raise DataError for a prompt that ends with an end token."""
        last = self._ends.get(token_ids[-1]) if token_ids else None
        written = text.rstrip()
        end = last or next((end for end in self._ends.values() if written.endswith(end)), None)
        if end is None or len(token_ids) == 1:
            return
        remedy = (
            "the chat template must begin the assistant's turn (add_generation_prompt)"
            if self._renderer.is_chat
            else "take it out of data.template, or let the tokenizer add no end token "
            "(add_eos_token in tokenizer_config.json)"
        )
        raise DataError(
            f"{self._renderer.name(place)}: the prompt ends with the end token {end}, and the "
            f"response would follow it; {remedy}"
        )
