"""The question of a row, for reward functions that show it to another model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def messages_of(question: object) -> list[dict[str, str]]:
    """Return a question as chat messages: a text as the user's, or messages {role, content}.

    Raises ValueError for anything else.
    """
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    items: Sequence[object] = question if isinstance(question, Sequence) else ()
    messages = [m for m in items if isinstance(m, Mapping) and {"role", "content"} <= m.keys()]
    if messages and len(messages) == len(items):
        return [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
    raise ValueError(
        f"a question must be a text or a list of messages {{role, content}}, got {question!r:.80}"
    )


def text_of(question: object) -> str:
    """Return a question as one text: the contents of its messages, an empty line between them."""
    return "\n\n".join(message["content"] for message in messages_of(question))
