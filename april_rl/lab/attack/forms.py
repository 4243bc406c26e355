"""The forms in which a response can state its answer, and the form that a prompt asks for."""

from __future__ import annotations

import re

# Name of each form, and how a response in this form ends.
FORMS: dict[str, str] = {
    "boxed": "The final answer is \\boxed{{{answer}}}",
    "answer_line": "Answer: {answer}",
    "plain number": "The final answer is {answer}",
    "bare answer": "{answer}",
}
_ASKS_BOX = re.compile(r"\\boxed\b")
_ASKS_LINE = re.compile(r"\banswer:", re.IGNORECASE)
_BOX = re.compile(r"\\boxed\{(.*)\}\s*$", re.DOTALL)


def state_answer(answer: str, form: str) -> str:
    """Return a response that states `answer` in one of FORMS, after a line of work."""
    plain = _BOX.sub(r"\1", answer) if form == "boxed" else answer
    return f"Some work is shown here.\n\n{FORMS[form].format(answer=plain)}"


def asked_form(prompt: str) -> str | None:
    """Return the form that the text of a prompt asks for; None when it asks for none of them.

    A prompt that asks for a box within an `Answer:` line is taken to ask for the box.
    """
    if _ASKS_BOX.search(prompt):
        return "boxed"
    return "answer_line" if _ASKS_LINE.search(prompt) else None


def another_answer(answer: str) -> str:
    """Return an answer that is not `answer`, of the same kind where that is a number."""
    try:
        return str(int(float(answer.replace(",", ""))) + 7)
    except (ValueError, OverflowError):
        return "\\text{no answer}"
