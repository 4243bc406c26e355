r"""Writes an answer in one plain form of LaTeX, no matter who wrote it and where it stood.

The data set's answer and the content of a box or an answer line go through the same `clean`, so a
period, a dollar sign, a `\,` or a `²` never decides whether an answer is right. Nothing here
changes what an answer says.
"""

from __future__ import annotations

import re
from fractions import Fraction

from april_rl.rewards.extraction import bare

_CHARACTERS = str.maketrans(
    {
        **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*"},
        **{"÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^\circ "},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv "},
        **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "…": r"\ldots "},
        **{"±": r"\pm ", "％": "%", "，": ",", "；": ";", "：": ":", "（": "(", "）": ")"},
        **{"²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
        **{"\N{NO-BREAK SPACE}": " ", "\N{NARROW NO-BREAK SPACE}": " ", "\N{THIN SPACE}": " "},
    }
)
_COMMAND_END = r"(?![A-Za-z])"
_REPLACEMENTS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac" + _COMMAND_END, r"\\frac"),
        (r"\\(?:[mb]?left|[mb]?right|[bB]igg?[lrm]?)(?=[\s()\[\]|.\\/<>{}])", ""),
        (r"\\(?:displaystyle|textstyle|limits|rm|bf|it)" + _COMMAND_END, " "),
        (r"\\(?:text|math)(?:rm|bf|it|sf|tt|normal)?" + _COMMAND_END + r"\s*(?=\{)", r"\\text"),
        (r"\\frac\s+(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\(?:mbox|textrm|operatorname|boldsymbol)" + _COMMAND_END + r"\s*(?=\{)", r"\\text"),
        (r"(?<=\d)(?:\{,\}|\\,|\\ |\\:|\\;|~|,\\!)\s*(?=\d{3}(?!\d))", ""),  # thousands
        (r"(?<!\\)\\[,;:! >]|~|\\q?quad" + _COMMAND_END, " "),
        (r"\\l?dots" + _COMMAND_END + r"|\\cdots" + _COMMAND_END + r"|\.{3}", r"\\ldots "),
        (r"\\lt" + _COMMAND_END, "<"),
        (r"\\gt" + _COMMAND_END, ">"),
        (r"\\leq(?:slant)?" + _COMMAND_END + "|<=", r"\\le "),
        (r"\\geq(?:slant)?" + _COMMAND_END + "|>=", r"\\ge "),
        (r"\\neq" + _COMMAND_END + "|!=", r"\\ne "),
        (r"\\varnothing" + _COMMAND_END, r"\\emptyset "),
        (r"\\lbrace" + _COMMAND_END, r"\\{"),
        (r"\\rbrace" + _COMMAND_END, r"\\}"),
        (r"\\colon" + _COMMAND_END, ":"),
        (r"\\text\{\s*([eid])\s*\}", r"\1"),
        (r"\\text\{\s*(and|or)\s*\}", r" \1 "),
        (r"\\text\{\s*\}", " "),
        (r"\{?\s*(\w+)\s*\\choose\s*(\w+)\s*\}?", r"\\binom{\1}{\2}"),
        (r"\*\*", "^"),
        (r"(?<=\d)\s*\^?\{?\s*(?:\\text\{\s*)?(?:st|nd|rd|th)\s*\}*$", ""),
        (r"(?<![A-Za-z\\])(?:infinity|inf)" + _COMMAND_END, r"\\infty "),
        (r"(?<![A-Za-z\\])pi" + _COMMAND_END, r"\\pi "),
        (r"(?<![A-Za-z\\])sqrt(?=[\s({\d])", r"\\sqrt"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<=\d)[eE]([+-]?\d+)(?![\w.])", r"\\times 10^{\1}"),
        (r"\^\{\s*(?:\\circ|\\degree)\s*\}|\\degree" + _COMMAND_END, r"^\\circ "),
        (r"([\^_])\{(\w)\}", r"\1\2"),
    )
)
_ESCAPED_TWICE = re.compile(r"\\\\(?=[A-Za-z{}])")
_REMARK = re.compile(r"\s\((?:since|because|as|by|where|for|note)\b[^()]*\)$", re.IGNORECASE)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_SPACED_DIGITS = re.compile(r"(?<![\d.,/^_])\d{1,3}(?: \d{3})+(?![\d/]| \d)")
_MIXED_NUMBER = re.compile(r"(?<![\d.,/^_}])(\d+) +(\d+)/(\d+)(?![\d/])")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)(?:\\overline|\\bar|\\dot)\s*\{?(\d+)\}?")
_LEADING_POINT = re.compile(r"(?<!\d)\.(?=\d)")
_ENDS = " \t\r\n,;"


def clean(answer: str) -> str:
    """Return an answer as plain LaTeX in one line, without markup and final punctuation."""
    text = bare(answer).translate(_CHARACTERS)
    if r"\begin" not in text:
        text = _ESCAPED_TWICE.sub(r"\\", text)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = _REMARK.sub("", " ".join(text.split()))
    text = bare(text.strip(_ENDS))
    text = _SPACED_DIGITS.sub(lambda found: found[0].replace(" ", ""), text)
    text = _MIXED_NUMBER.sub(r"(\1+\\frac{\2}{\3})", text)
    text = _REPEATING.sub(lambda found: _fraction(*found.groups()), text)
    return _LEADING_POINT.sub("0.", text).strip(_ENDS)


def squeeze(text: str) -> str:
    """Return a cleaned answer without `\\text` and without spaces, except between two words."""
    return re.sub(r"(?<=\W) +| +(?=\W)", "", " ".join(_TEXT.sub(r" \1 ", text).split()))


def _fraction(whole: str, fixed: str, repeated: str) -> str:
    """Return a repeating decimal as a fraction: 0.1(6) is 1/6."""
    scale = 10 ** len(fixed)
    value = Fraction(int(f"{whole or 0}{fixed}"), scale)
    value += Fraction(int(repeated), scale * (10 ** len(repeated) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
