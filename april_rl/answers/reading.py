r"""Finds out what kind of thing a cleaned answer is: a number, a list, an equation, a time,
words...

`read` looks at the written form alone. It takes a recognised answer apart, down to expressions
that a parser of LaTeX can read as a whole. An answer that it cannot take apart without a loss is
`Verbatim`, which is compared as text.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from april_rl.answers.brackets import closing, depth, split
from april_rl.answers.clean import squeeze
from april_rl.answers.expressions import GREEK
from april_rl.answers.kinds import (
    Answer,
    Approximation,
    Based,
    Choice,
    Congruence,
    Equation,
    Expression,
    Listing,
    Number,
    Proportion,
    Quantity,
    Table,
    Time,
    Verbatim,
    Words,
)
from april_rl.answers.units import unit_of

_SEPARATOR = re.compile(
    r"(?:,\s*|\s|(?<=[)\]}]))(?:and|or)(?:\s|(?=[(\[\\]))|,"
)  # separators as in "1, 2, and 3"
_CONNECTIVES = {word: re.compile(rf"(?:\s|(?<=[)\]}}])){word}\s") for word in ("and", "or")}
_SEMICOLON = re.compile(";")
# For example x | x > 3.
_SET_BUILDER = re.compile(r"[A-Za-z]\s*(?:\\in\s*\S+\s*)?(?:\||\\mid|:)(.+)")
_COMMA = re.compile(r"[,;]")
_NAMES_BETWEEN = re.compile("[,:]")
_COLON = re.compile(":")
_SIGN = re.compile(r"=|\\in(?![A-Za-z])")
_ABOUT = re.compile(r"\\approx(?![A-Za-z])")
# What may stand to the left of "= 5" when the answer is 5: a name, with subscripts and arguments.
_ARGUMENTS = re.compile(r"_\{[^{}]*\}|_\w|\([^()]*\)")
_NAME = re.compile(r"(?:\\frac\{d\w*\}\{d\w+\}|[A-Za-z\\|][A-Za-z\\|'{} ]*)\s*")
_NUMBER = re.compile(r"([+-]?)\s*(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?")
_ANY_NUMBERS = re.compile(r"\d{3}(?:,\d{3})+")  # of 3,100 the comma separates thousands
_FRACTION = re.compile(
    r"([+-]?)\s*(?:\\frac\s*(?:\{([+-]?\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))|(\d+)\s*/\s*(\d+))"
)
_ENVIRONMENT = re.compile(r"\\begin\{(\w+)\*?\}(?:\{[lcr|]*\})?(.*)\\end\{\1\*?\}")
_TABLES = ("matrix", "pmatrix", "bmatrix", "array", "cases")
_PAIRS = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle"}
_TIME = re.compile(
    r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*(?:\\text\{\s*)?(?:([ap])\.?\s?m\.?)?\s*\}?",
    re.IGNORECASE,
)
_BASED = re.compile(
    r"\(?\s*(\d[0-9A-Fa-f]*|[A-Fa-f][0-9A-Fa-f]+(?=_\{?16))\s*\)?"
    r"_\s*(?:\{\s*)?(?:\\text\{)?(\d+|[a-z]+)[\s}]*"
)
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7"}
_BASES |= {"eight": "8", "nine": "9", "ten": "10", "twelve": "12", "sixteen": "16"}
_MODULUS = re.compile(
    r"(.*?)(?:\\equiv(?P<residues>.*?))?,?\s*(?:\\pmod|\(?\\b?mod|\(?\\text\{\s*mod\s*\}|\(?\bmod\b)"
    r"\s*(?P<modulus>\{[^{}]*\}|[^(){}]+)\)?"
)
_CHOICE = re.compile(
    r"(?:\\text\{)?\s*\(([A-J])\)\s*\}?(?:(?<=\})|\s|:|$)\s*(.*)|([A-J])[.):]\s+(.*)"
)
_ONE_LETTER = re.compile(r"([A-J])[.):]?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '’-]+[^\W\d_]+)*\.?")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
# Two-letter words; any other pair of letters is a product.
_SHORT_WORDS = frozenset(("am", "at", "by", "do", "go", "if", "in", "is", "it", "me", "my", "no"))
_SHORT_WORDS |= {"of", "on", "or", "so", "to", "up", "us", "we"}
# Nesting depth of brackets up to which an answer is taken apart; the parser is slow there.
DEEPEST = 10


@lru_cache(maxsize=1024)
def read(text: str) -> Answer:
    """Return a cleaned answer by its kind."""
    if depth(text) > DEEPEST:
        return Verbatim(text)
    if wrapped := _TEXT.fullmatch(text):
        text = wrapped[1].strip()
    for reader in (_table, _ellipsis, _congruence, _list, _equation, _brackets, _choice):
        if (found := reader(text)) is not None:
            return found
    for reader in (_number, _time, _ratio, _numeral, _words, _quantity, _two_signs):
        if (found := reader(text)) is not None:
            return found
    return Expression(text)


def number_of(text: str) -> Number | None:
    """Return a whole number, a decimal or a fraction of whole numbers; None for anything else."""
    if found := _NUMBER.fullmatch(text):
        sign, whole, decimals = found.groups(default="")
        if whole.startswith("0,"):  # a decimal comma
            whole, decimals = "0", f".{whole[2:].replace(',', '')}"
        value = Fraction(f"{sign}{whole.replace(',', '')}{decimals}")
        return Number(
            text, value, bool(decimals), bool(_ANY_NUMBERS.fullmatch(whole)) and not decimals
        )
    if not (found := _FRACTION.fullmatch(text)):
        return None
    sign, *parts = found.groups(default="")
    above, below = (int(part) for part in parts if part)
    if below == 0:
        return None
    return Number(text, Fraction(-above if sign == "-" else above, below), False, False)


def is_name(text: str) -> bool:
    """Return whether a text names an object that has a value: x, x_1, f(2), AB, (p, q), V_1:V_2."""
    parts = split(text.removeprefix("(").removesuffix(")"), _NAMES_BETWEEN)
    if len(parts) == 1:
        parts = [text]
    return all(_NAME.fullmatch(_ARGUMENTS.sub("", part)) for part in parts)


_number = number_of


def _table(text: str) -> Answer | None:
    found = _ENVIRONMENT.fullmatch(text.strip("[]() ") if r"\begin" in text else text)
    if found is None or r"\begin" in found[2]:
        return None
    if found[1] not in _TABLES:
        return None if found[1].endswith("matrix") else Verbatim(text)
    rows = [row for row in found[2].split(r"\\") if row.strip()]
    cells = tuple(tuple(read(cell.strip(" ,;.")) for cell in row.split("&")) for row in rows)
    if found[1] == "cases" and all(len(row) == 1 and name_of(row[0]) for row in cells):
        return Listing(text, "", tuple(row[0] for row in cells), "")
    return Table(text, "cases" if found[1] == "cases" else "matrix", cells)


def _ellipsis(text: str) -> Answer | None:
    return Verbatim(text) if r"\ldots" in text else None


def _list(text: str) -> Answer | None:
    parts = split(text, _SEMICOLON)
    if len(parts) == 1:
        parts = split(text, _SEPARATOR)
    if len(parts) == 1 or _NUMBER.fullmatch(text):
        return None
    if any(not part for part in parts):
        return Verbatim(text)
    members = _members(parts)
    if len(groups := _groups(text, members)) > 1:
        return Listing(text, "", groups, "")
    used = [word for word, mark in _CONNECTIVES.items() if len(split(text, mark)) > 1]
    return Listing(text, "", members, "", tuple(used))


def _groups(text: str, members: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """Return the groups of named values in x = 1, y = 2 or x = 2, y = 1; () if there are none."""
    names = [name_of(member) for member in members]
    size = len(set(names))
    whole = range(0, len(names), size)
    if size == 1 or not all(
        names[i : i + size] and set(names[i : i + size]) == set(names) for i in whole
    ):
        return ()
    if any(len(split(part, _SEPARATOR)) % size for part in split(text, _CONNECTIVES["or"])):
        return ()
    parts = [members[i : i + size] for i in whole]
    return tuple(Listing(", ".join(each.text for each in part), "", part, "") for part in parts)


def name_of(answer: Answer) -> str:
    """Return the name in an equation such as x = 1; "" for an answer without one."""
    if (
        not isinstance(answer, Equation)
        or len(answer.sides) > 2
        or not is_name(answer.sides[0].text)
    ):
        return ""
    return squeeze(answer.sides[0].text)


def _congruence(text: str) -> Answer | None:
    if text.count("mod") != 1 or not (found := _MODULUS.fullmatch(text)):
        return None
    name, residues = found[1].strip(" (,"), found["residues"]
    if residues is None:
        name, residues = "", name
    if not residues.strip():
        return Verbatim(text)
    modulus = found["modulus"].strip("{} ")
    return Congruence(
        text, read(name) if name else None, read(residues.strip(" (,")), read(modulus)
    )


def _equation(text: str) -> Answer | None:
    for sign in (_ABOUT, _SIGN):
        sides = split(text, sign)
        if len(sides) > 1:
            break
    else:
        return None
    if not all(sides):
        return Verbatim(text)
    if sign is _SIGN or is_name(sides[0]):
        return Equation(text, tuple(map(read, sides)))
    return (
        Approximation(text, read(sides[0]), read(sides[1])) if len(sides) == 2 else Verbatim(text)
    )


def _brackets(text: str) -> Answer | None:
    opening = next((mark for mark in (*_PAIRS, "{") if text.startswith(mark)), None)
    if opening is None:
        return None
    end, mark = closing(text, len(opening))
    if end + len(mark) != len(text) or not mark:
        return None
    inner = text[len(opening) : end].strip()
    if opening == r"\{" and (found := _SET_BUILDER.fullmatch(inner)):
        return read(found[1].strip())
    parts = split(inner, _COMMA, thousands=False)
    if len(parts) == 1 and opening in "({":
        return read(inner) if inner and (opening == "{" or number_of(inner)) else None
    if not inner or any(not part for part in parts) or r"\mid" in inner or inner.count("|") % 2:
        return Verbatim(text) if inner else Expression(r"\emptyset ")
    if opening == "{":  # TeX does not show these braces
        return Listing(text, "", _members(parts), "")
    members = _members(parts) if opening == r"\{" else tuple(map(read, parts))
    return Listing(text, opening, members, mark)


def _choice(text: str) -> Answer | None:
    if found := _ONE_LETTER.fullmatch(text):
        return Choice(text, found[1], None)
    if not (found := _CHOICE.fullmatch(text)):
        return None
    content = (found[2] or found[4] or "").strip()
    return Choice(text, found[1] or found[3], read(content) if content else None)


def _time(text: str) -> Answer | None:
    if not (found := _TIME.fullmatch(text)):
        return None
    numbers = tuple(int(part) for part in found.groups()[:3] if part)
    return Time(text, numbers, f"{found[4].lower()}m" if found[4] else "")


def _ratio(text: str) -> Answer | None:
    parts = split(text, _COLON)
    if len(parts) == 1:
        return None
    return Proportion(text, tuple(map(read, parts))) if all(parts) else Verbatim(text)


def _numeral(text: str) -> Answer | None:
    if not (found := _BASED.fullmatch(text)):
        return None
    base = _BASES.get(found[2], found[2])
    return Based(text, found[1].upper().lstrip("0") or "0", base) if base.isdigit() else None


def _words(text: str) -> Answer | None:
    plain = " ".join(_TEXT.sub(r" \1 ", text).split())
    if not _WORDS.fullmatch(plain) or len(plain) == 1 or GREEK.fullmatch(plain):
        return None
    longest = max(map(len, plain.split()))
    if plain == text and longest <= 2 and plain.lower() not in _SHORT_WORDS:
        return None  # it is a product of letters
    return Words(plain)


def _quantity(text: str) -> Answer | None:
    if (found := unit_of(text)) is None:
        return None
    value, factor, unit = found
    read_value = read(value)
    if factor != 1:
        if not isinstance(read_value, Number):
            return Verbatim(text)
        read_value = Number(text, read_value.value * factor, False, False)
    return Quantity(text, read_value, unit) if unit is not None else read_value


def _two_signs(text: str) -> Answer | None:
    if r"\pm" not in text:
        return None
    plus = text.replace(r"\pm", "+").replace(r"\mp", "-")
    minus = text.replace(r"\pm", "-").replace(r"\mp", "+")
    members = [read(part.strip().removeprefix("+").strip()) for part in (plus, minus)]
    return Listing(text, "", tuple(members), "")


def _members(parts: list[str]) -> tuple[Answer, ...]:
    r"""Read the members of a list; one with `\pm` is two."""
    found: list[Answer] = []
    for part in parts:
        member = read(part)
        if isinstance(member, Listing) and not member.opening and r"\pm" in part:
            found.extend(member.members)
        else:
            found.append(member)
    return tuple(found)
