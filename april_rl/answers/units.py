r"""Separates the unit, percent sign or scale word ("million") behind a number from the number."""

from __future__ import annotations

import re

PERCENT = "%"
DEGREE = "degree"

_CURRENCIES = {r"\$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee"}
_CURRENCY = "|".join(map(re.escape, _CURRENCIES))
_BEFORE = re.compile(rf"([+-]?)\s*({_CURRENCY})\s*(.+)")
_AFTER = re.compile(rf"(.+?)\s*({_CURRENCY})")
_PERCENT = re.compile(
    r"(.+?)\s*(?:\\?%|(?:\\text\{)?\s*(?:percent(?:age)?|pct|per cent)(?: points?)?\s*\}?)",
    re.IGNORECASE,
)
_DEGREES = re.compile(r"(.+?)\s*\^\s*\\circ\s*(?:\\text\{)?\s*([CF]?)\s*\}?")
# A sign of degrees behind these belongs to a part: \sin 2^\circ, 30^\circ + 45^\circ.
_IN_PARTS = re.compile(r"\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)|log|ln|exp|circ)(?![a-z])")
_WORD = r"(?:\\text\{[^{}]+\}|[A-Za-z]{2,}\.?)"
_POWER = r"(?:\s*\^\s*\{?-?\d\}?)?"
_REST = rf"(?:\s*(?:/|\\cdot|\s|-)\s*(?:{_WORD}|[a-z](?![a-z])){_POWER})*"
_UNIT = re.compile(
    rf"(?P<value>.*?[\d}})]|.*\\pi|.+?(?=\\text))\s*(?P<unit>{_WORD}{_POWER}{_REST})"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_LETTERS = re.compile(r"[A-Za-z]+")

# Words for one unit; the first one is its canonical name.
_SYNONYMS = (
    "mm millimeter millimetre",
    "cm centimeter centimetre",
    "m meter metre",
    "km kilometer kilometre kms",
    "in inch inches",
    "ft foot feet",
    "yd yard",
    "mi mile",
    "g gram gramme gm",
    "kg kilogram kilo",
    "lb lbs pound",
    "s second sec",
    "min minute",
    "h hour hr",
    "day",
    "year yr",
    "l liter litre",
    "ml milliliter millilitre",
    "dollar usd",
    "cent",
    f"{DEGREE} deg",
    "mi/h mph",
    "km/h kmh kmph kph",
)
_NAMES = {word: words.split()[0] for words in _SYNONYMS for word in words.split()}
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000} | {
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
# Words after a number that are not units, because they change its meaning.
_NO_UNITS = frozenset(
    (
        *("and", "or", "but", "no", "not", "to", "than", "more", "less", "least", "most", "about"),
        *("only", "if", "for", "when", "where", "except", "each", "half", "minus", "plus", "over"),
        *("times", "pi", "root", "power", "squared", "cubed", "factorial", "sqrt", "sin", "cos"),
        *("tan", "cot", "sec", "csc", "log", "ln", "exp", "max", "gcd", "lcm", "mod"),
        *("st", "nd", "rd", "th"),
    )
)


def unit_of(text: str) -> tuple[str, int, str | None] | None:
    """Return the value in a quantity as text, the factor of its scale word (1 without one) and its
    unit; None for a text that is not a quantity.

    The unit is canonical ("cm^2"), "" for words such as "units", and None if there was only a
    scale word.
    """
    if found := _BEFORE.fullmatch(text):
        rest = unit_of(found[3])
        value, factor = (rest[0], rest[1]) if rest else (found[3], 1)
        return found[1] + value, factor, _CURRENCIES[found[2]]
    if found := _AFTER.fullmatch(text):
        return found[1], 1, _CURRENCIES[found[2]]
    if found := _PERCENT.fullmatch(text):
        return found[1].rstrip("\\ "), 1, PERCENT
    if found := _DEGREES.fullmatch(text):
        return None if _IN_PARTS.search(found[1]) else (found[1], 1, DEGREE + found[2])
    if not (found := _UNIT.fullmatch(text)):
        return None
    words = " ".join(_TEXT.sub(r" \1 ", found["unit"]).split()).lower()
    if r"\text" not in found["unit"] and not _may_be_unit(words, text, found.start("unit")):
        return None
    first, _, rest_of_words = words.partition(" ")
    factor = _SCALES.get(first, 1)
    words = rest_of_words if factor != 1 else words
    if not words:
        return found["value"].strip(), factor, None
    if _NO_UNITS.intersection(_LETTERS.findall(words)[:1]) or "mod" in words.split():
        return None
    unit = canonical_unit(words)
    if unit == DEGREE and _IN_PARTS.search(found["value"]):
        return None
    return found["value"].strip(), factor, unit


def canonical_unit(words: str) -> str:
    """Return one name for all spellings of a unit; "" for words that name none ("units").

    >>> canonical_unit("square centimetres"), canonical_unit("km per hour")
    ('cm^2', 'km/h')
    """
    words = words.replace(" per ", "/").replace(".", "").replace("-", " ")
    return "/".join(_factor(part) for part in words.split("/")).strip("/")


def _factor(words: str) -> str:
    power, names = "", []
    for word in re.sub(r"\s*\^\s*\{?(-?\d)\}?", r" ^\1 ", words).split():
        if word.startswith("^"):
            power = word[1:]
        elif word in _POWERS:
            power = _POWERS[word]
        elif (name := _singular(word)) != "unit":
            names.append(name)
    name = " ".join(names)
    return f"{name}^{power}" if name and power else name


def _singular(word: str) -> str:
    short = word.removesuffix("s") if len(word) > 2 else word
    return _NAMES.get(word) or _NAMES.get(short) or short


def _may_be_unit(words: str, text: str, start: int) -> bool:
    first = words.split()[0].split("/")[0].split("^")[0].rstrip(".")
    is_known = first in _NAMES or first in _POWERS or first in _SCALES or first.endswith("units")
    if not text[:start].endswith(" "):
        return is_known
    return is_known or len(first) > 2
