"""The question of a data row, for reward functions that show it to another model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from april_rl.task.rewards.loading import Reward


def messages_of(question: object) -> list[dict[str, str]]:
    """Return a question, a text or messages, as chat messages; raise ValueError for others."""
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
    return "\n\n".join(message["content"] for message in messages_of(question))


def with_question(
    score: Callable[..., object], column: str | None, *, last_failure: Callable[[], str]
) -> Reward:
    """Return a reward that gets a data column, or else the prompt, as its `questions`."""

    def reward(
        prompts: Sequence[str],
        responses: Sequence[str],
        answers: Sequence[str],
        **columns: Sequence[object],
    ) -> object:
        questions = None if column is None else columns[column]
        return score(prompts, responses, answers, questions=questions)

    columns = () if column is None else (column,)
    return Reward(call=reward, columns=columns, last_failure=last_failure)
