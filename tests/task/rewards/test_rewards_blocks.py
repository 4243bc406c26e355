"""The program in a response, between code fences as models write them."""

from __future__ import annotations

import time

import pytest

from april_rl.task.rewards.code.blocks import last_block

F = "```"

BLOCKS: dict[str, tuple[str, str | None]] = {
    "named": (f"{F}python\nx\n{F}", "x\n"),
    "without a name": (f"Here:\n{F}\nx\n{F}\nDone.", "x\n"),
    "with a title": (f'{F}python title="a.py"\nx\n{F}', "x\n"),
    "in braces": (f"{F}{{.python .numbers}}\nx\n{F}", "x\n"),
    "a space before the name": (f"{F} Python3\nx\n{F}", "x\n"),
    "four ticks": (f"````python\n{F}\nx\n{F}\n````", f"{F}\nx\n{F}\n"),
    "closed by more ticks": (f"{F}python\nx\n`````", "x\n"),
    "tildes": (f"~~~python\n{F}\nx\n~~~", f"{F}\nx\n"),
    "closed on the last line": (f"{F}python\nif a:\n    x{F}\nDone.", "if a:\n    x\n"),
    "in a list": (f"1. Do:\n\n   {F}python\n   if a:\n\n       x\n   {F}\n", "if a:\n\n    x\n"),
    "on the line of a bullet": (f"- {F}py\n  if a:\n    x\n  {F}", "if a:\n  x\n"),
    "deeper than its fence": (f"   {F}python\n     if a:\n       x\n   {F}", "if a:\n  x\n"),
    "less deep than its fence": (f"   {F}python\nif a:\n    x\n   {F}", "if a:\n x\n"),
    "a fence in a docstring": (
        f'{F}python\n"""\n{F}\nf(2)\n{F}\n"""\nx\n{F}',
        f'"""\n{F}\nf(2)\n{F}\n"""\nx\n',
    ),
    "a named fence in a docstring": (
        f"{F}python\ndef f():\n    '''Use:\n\n    {F}python\n    f(2)\n    {F}\n    '''\n{F}",
        f"def f():\n    '''Use:\n\n    {F}python\n    f(2)\n    {F}\n    '''\n",
    ),
    "a fence in a comment": (f"{F}python\n# {F}\nx\n# {F}\n{F}", f"# {F}\nx\n# {F}\n"),
    "quotes in a text": (f"{F}python\nx = '\"\"\"'  # '''\n{F}\nOk.", "x = '\"\"\"'  # '''\n"),
    "a docstring without an end": (f'{F}python\n"""\nx\n{F}\n{F}python\ny\n{F}', "y\n"),
    "the last of several": (f"{F}python\nx\n{F}\nor\n{F}python\ny\n{F}\n{F}python\nz", "y\n"),
    "its output after it": (f"{F}python\nx\n{F}\nIt prints\n{F}\n4\n{F}", "x\n"),
    "a shell after it": (f"{F}python\nx\n{F}\n{F}bash\npython x.py\n{F}", "x\n"),
    "text before it": (f"{F}text\nIt's \"\"\"\n{F}\n{F}python\nx\n{F}", "x\n"),
    "carriage returns": (f"{F}python\r\nx\r\n{F}\r\n", "x\n"),
    "another language": (f"{F}cpp\nx\n{F}", None),
    "not closed": (f"{F}python\nx\n", None),
    "within a line": (f"{F}python x{F}", None),
    "in a thought": (f"<think>\n{F}python\nx\n{F}\n</think>\nNone.", None),
    "in a thought without an end": (f"<think>\n{F}python\nx\n{F}", None),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_fences_are_read_as_models_write_them(name: str) -> None:
    response, program = BLOCKS[name]
    assert last_block(response) == program


@pytest.mark.parametrize(
    "response",
    [
        "```python\n" * 20_000,
        "```python\n'''\n```\n" * 20_000,
        '```python\n"""\n```\n' + "'''\n```\n" * 20_000,
        "```python\n" + '\\"' * 200_000,
        "- " * 100_000,
        "~~~\n```\n" * 20_000,
    ],
)
def test_responses_are_read_in_linear_time(response: str) -> None:
    start_s = time.process_time()
    last_block(response)
    assert time.process_time() - start_s < 1.0
