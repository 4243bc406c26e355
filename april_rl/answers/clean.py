r"""Writes an answer in one plain form of LaTeX, no matter who wrote it and where it stood.

The data set's answer and the content of a box or an answer line go through the same `clean`, so a
period, a dollar sign, a `\,` or a `²` never decides whether an answer is right. Nothing here
changes what an answer says.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from itertools import groupby

from april_rl.answers.extraction import bare

_CHARACTERS = str.maketrans(
    {
        **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*"},
        **{"÷": r"\div ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^\circ "},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv "},
        **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "…": r"\ldots "},
        **{"±": r"\pm ", "′": "'", "″": "''", "\N{FRACTION SLASH}": "/"},
        **{"\N{NO-BREAK SPACE}": " ", "\N{NARROW NO-BREAK SPACE}": " ", "\N{THIN SPACE}": " "},
    }
)
# Characters whose Unicode decomposition has one of these names, and how a run of them is written.
_FORMS = {"<super>": "^{%s}", "<sub>": "_{%s}", "<wide>": "%s", "<fraction>": "%s"}
_VULGAR = re.compile(r"(\d+)\N{FRACTION SLASH}(\d+)")
_GREEK = re.compile("[\N{GREEK CAPITAL LETTER ALPHA}-\N{GREEK SMALL LETTER OMEGA}]")
_COMMAND_END = r"(?![A-Za-z])"
_FUNCTION = r"(?<![A-Za-z\\])(?:(?:arc)?(?:sin|cos|tan|cot)h?|sec|csc|ln|log|exp)"

_ARGUMENT = r"\w|\\(?!(?:sqrt|frac|text)(?![a-z]))[A-Za-z]+"
_REPLACEMENTS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac" + _COMMAND_END, r"\\frac"),
        (r"\\(?:[mb]?left|[mb]?right|[bB]igg?[lrm]?)(?=[\s()\[\]|.\\/<>{}])", ""),
        (r"\\(?:displaystyle|textstyle|limits|rm|bf|it)" + _COMMAND_END, " "),
        (r"\\(?:text|math)(?:rm|bf|it|sf|tt|normal)?" + _COMMAND_END + r"\s*(?=\{)", r"\\text"),
        (rf"\\frac\s*({_ARGUMENT})\s*(?=[\\\w{{])", r"\\frac{\1}"),
        (rf"(\\frac\s*\{{[^{{}}]*\}})\s*({_ARGUMENT})", r"\1{\2}"),
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
        (r"\^\s*([+-]\s*(?:\([^()]*\)|\d+(?:\.\d+)?|[A-Za-z]))", r"^{\1}"),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"(?<![A-Za-z\\])log(\d+)\s*(?=\()", r"\\log_{\1}"),
        (_FUNCTION + r"(?=\s*[(^_\\]|\s+(?:\d|[A-Za-z](?![A-Za-z])))", r"\\\g<0> "),
        (r"(?<![A-Za-z\\])[aA]bs\s*\(([^()]*)\)", r"|\1|"),
        (r"\\prime" + _COMMAND_END, "'"),
        (r"\^\s*\{?\s*('[\s']*)\}?", r"\1"),
        (r"(?<=\d)\s*\^?\{?\s*(?:\\text\{\s*)?(?:st|nd|rd|th)\s*\}*$", ""),
        (r"(?<![A-Za-z\\])(?:infinity|inf)" + _COMMAND_END, r"\\infty "),
        (r"(?<![A-Za-z\\])pi" + _COMMAND_END, r"\\pi "),
        (r"(?<![A-Za-z\\])sqrt(?=[\s({\d])", r"\\sqrt"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<=\d)[eE]([+-]?\d+)(?![\w.])", r"\\times 10^{\1}"),
        (r"\^\{\s*(?:\\circ|\\degree)\s*\}|\\degree" + _COMMAND_END, r"^\\circ "),
        (r"([\^_])\{(\w)\}(?!\d)", r"\1\2"),
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
    text = _plain_characters(bare(answer).replace("º", "°"))
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


def _plain_characters(text: str) -> str:
    """Return a text with ⁻³, ₁₀, ⅓, full-width characters and Greek letters as LaTeX has them."""
    written = ""
    for form, run in groupby(text, lambda each: unicodedata.decomposition(each).split(" ")[0]):
        characters = "".join(run)
        if form in _FORMS:
            plain = _VULGAR.sub(r"\\frac{\1}{\2}", unicodedata.normalize("NFKC", characters))
            characters = _FORMS[form] % plain
        written += characters
    return _GREEK.sub(_greek, written).translate(_CHARACTERS)


def _greek(found: re.Match[str]) -> str:
    words = unicodedata.name(found[0], "").replace("LAMDA", "LAMBDA").split()
    name = words[-1] if words else found[0]
    return f"\\{name.capitalize() if 'CAPITAL' in words else name.lower()} "


def _fraction(whole: str, fixed: str, repeated: str) -> str:
    """Return a repeating decimal as a fraction: 0.1(6) is 1/6."""
    scale = 10 ** len(fixed)
    value = Fraction(int(f"{whole or 0}{fixed}"), scale)
    value += Fraction(int(repeated), scale * (10 ** len(repeated) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
