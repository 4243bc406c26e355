r"""Compares two formulas that a parser of LaTeX reads as a whole, by sympy and math-verify.

Deviations from math-verify alone: small numbers are compared relatively; two equations are equal
only if they have the same terms or an equal set of solutions that is not empty; case matters where
a formula has a letter in both cases (R and r), and for Greek letters; 1 < x < 5 is 5 > x > 1; an
exponent T is not a transpose; a formula with a letter that the parser drops is not read.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean

# It would warn that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Decimals are equal if six significant digits agree, or six places for numbers above 1.
PLACES = Fraction(5, 10**7)
SMALL = Fraction(1, 10)
EXACT_DIGITS = 60

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none"
)
_WORD = re.compile(r"(?<![\\A-Za-z{])(?!(?:sinh|cosh|tanh|sqrt|arc))[A-Za-z]{4,}(?![A-Za-z}])")
_COMMAND = re.compile(r"\\[A-Za-z]+")
GREEK = re.compile(
    r"(?<![A-Za-z\\])(?:alpha|beta|[gG]amma|[dD]elta|epsilon|zeta|eta|[tT]heta|iota|kappa|[lL]ambda"
    r"|mu|nu|[xX]i|rho|[sS]igma|tau|[uU]psilon|[pP]hi|chi|[pP]si|[oO]mega)(?![A-Za-z}])"
)
_GREEK_CAPITAL = re.compile(
    r"\\?(?:Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)(?![A-Za-z])"
)
# What the parser would multiply, subtract or drop: two numbers side by side, a number after a
# letter, a subscript of a number, an operator d/dx, a date, products of vectors, a transpose.
_LOST = re.compile(
    r"(?<![_^])\d\s+\d|(?<![\\A-Za-z])[A-Za-z](?:_\{\w+\}\s*|\s+)\d|\d_|\\text|\\ldots|\\mid|\\to(?![a-z])"
    r"|'\s*\(|\\frac\{(?:d|\\partial)\W|\b(?:and|or)\b|\d{4}-\d{1,2}-\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}"
    r"|\\(?:vec|overrightarrow|nabla)\b.*\\(?:times|cdot)"
    r"|\\top|(?:[A-Za-df-z]|\([A-Za-z\s]+\)|\])\s*\^\s*T(?![a-z])"
)
# What stands for a new unknown: y', y^{(4)}, dy/dx.
_DIFFERENTIAL = r"(?:d|\\partial)\s*(?:\^\{?\d\}?)?\s*\\?[A-Za-z]+\s*(?:\^\{?\d\}?)?"
_DERIVATIVE = re.compile(
    rf"\\frac\s*\{{({_DIFFERENTIAL})\}}\s*\{{({_DIFFERENTIAL})\}}"
    rf"|(?<![A-Za-z\\])(d\s?[A-Za-z])\s?/\s?(d\s?[A-Za-z])(?![A-Za-z])"
)
_PRIMES = re.compile(r"(?<=[A-Za-z])('+)|(?<=[A-Za-df-z])\^\{\((\d)\)\}")
_NO_NAME = re.compile(r"\\frac|\\partial|[^A-Za-z0-9]")
_NO_LETTER = re.compile(r"\\(?:begin|end|mathbb)\s*(?:\{\w+\*?\}|\w)|\\[A-Za-z]+")
_EXPONENT_T = re.compile(r"\^\s*T(?![a-z])")
Parsed: TypeAlias = sympy.Basic | sympy.MatrixBase
_UNBOUNDED = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)


@lru_cache(maxsize=1024)  # responses of a group often state the same answer
def are_equal_formulas(gold: str, text: str) -> bool:
    """Return whether two formulas are equal; False where one cannot be read as a whole."""
    keeps_case = _has_both_cases(gold) or _has_both_cases(text)
    keeps_case = keeps_case or _GREEK_CAPITAL.search(f"{gold} {text}") is not None
    expected, found = _parse(gold, keeps_case), _parse(text, keeps_case)
    if expected is None or found is None or _is_lossy(gold, expected) or _is_lossy(text, found):
        return False
    try:
        return _are_equal(expected, found)
    except Exception:  # sympy raises errors of any kind for objects without a rule
        return False


def _are_equal(expected: Parsed, found: Parsed) -> bool:
    if isinstance(expected, sympy.Symbol) and isinstance(found, sympy.Symbol):
        return bool(expected == found)
    if _is_number(expected) and _is_number(found):
        return _are_equal_numbers(expected, found)
    if isinstance(expected, Boolean) and isinstance(found, Boolean) and not expected.free_symbols:
        return False  # 1 < 2 and 2 < 3 are both true, but not the same answer
    if _solutions(expected) is not None and _solutions(expected) == _solutions(found):
        return True
    if not verify(expected, found, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    if isinstance(expected, sympy.Eq) and isinstance(found, sympy.Eq):
        return _have_equal_terms(expected, found) or _is_solvable(expected)
    return True


def are_equal_decimals(gold: Fraction, value: Fraction) -> bool:
    """Return whether two numbers, one of them rounded to a decimal, are equal."""
    return abs(gold - value) <= PLACES * min(Fraction(1), abs(gold) / SMALL)


def rounds_to(formula: str, decimal: Fraction, places: int) -> bool:
    """Return whether a formula is a number that rounds to `decimal` at `places` decimal places."""
    parsed = _parse(formula, False)
    if parsed is None or not _is_number(parsed):
        return False
    value = sympy.N(parsed, 30)
    if not value.is_Float:
        return False
    return abs(Fraction(str(value)) - decimal) <= Fraction(1, 10**places)


def num_variables(formula: str) -> int:
    """Return how many variables a formula has; 0 where it cannot be read."""
    parsed = _parse(formula, False)
    return 0 if parsed is None else len(parsed.free_symbols)


@lru_cache(maxsize=1024)
def _parse(text: str, keeps_case: bool) -> Parsed | None:
    """Return a formula in sympy's form; None when the parser does not read all of it."""
    named = _WORD.sub(r"\\text{\g<0>}", GREEK.sub(r"\\\g<0> ", _with_unknowns(text)))
    try:
        return latex2sympy(
            named,
            is_real=not should_treat_as_complex(text),
            convert_degrees=True,
            normalization_config=_NORMALIZATION,
            conversion_config=ConversionConfig(lowercase_symbols=not keeps_case),
        )
    except Exception:  # the parser raises errors of any kind for a text that is not a formula
        return None


def _with_unknowns(text: str) -> str:
    """Return a formula with a name of its own for y', y^{(4)} and dy/dx, and T as an exponent."""
    text = _DERIVATIVE.sub(lambda found: f"{{D_{{{_NO_NAME.sub('', found[0])}}}}}", text)
    text = _PRIMES.sub(lambda found: f"_{{{'p' * len(found[1] or 'p' * int(found[2]))}}}", text)
    return _EXPONENT_T.sub("^{(T)}", text)


def _is_lossy(text: str, parsed: Parsed) -> bool:
    """Return whether the parser has dropped or misread something that is written."""
    if _LOST.search(text) or "'" in (text := _with_unknowns(text)):
        return True
    names = "".join(map(str, parsed.atoms(sympy.Symbol, AppliedUndef))).lower()
    return bool(set(re.findall("[abcf-hj-z]", _NO_LETTER.sub(" ", text).lower())) - set(names))


def _solutions(parsed: Parsed) -> tuple[sympy.Basic, sympy.Set] | None:
    if isinstance(parsed, sympy.Eq) or not isinstance(parsed, Boolean):
        return None
    names = parsed.free_symbols
    return (*names, parsed.as_set()) if len(names) == 1 else None


def _is_number(parsed: Parsed) -> bool:
    return isinstance(parsed, sympy.Expr) and not (
        parsed.free_symbols or parsed.atoms(AppliedUndef)
    )


def _are_equal_numbers(gold: sympy.Expr, other: sympy.Expr) -> bool:
    gold, other = gold.doit(), other.doit()
    if gold in _UNBOUNDED or other in _UNBOUNDED:
        return bool(gold == other and gold in (sympy.oo, -sympy.oo))
    if gold.is_Rational and other.is_Rational:
        return bool(gold == other)
    difference = abs(sympy.N(gold - other, EXACT_DIGITS, maxn=4 * EXACT_DIGITS))
    size = abs(sympy.N(gold, 15))
    if not (difference.is_Number and size.is_Number):
        return False
    if gold.has(sympy.Float) or other.has(sympy.Float):
        return are_equal_decimals(Fraction(str(size)), Fraction(str(size + difference)))
    return bool(difference <= size * sympy.Float(10) ** (-EXACT_DIGITS // 2))


def _have_equal_terms(gold: sympy.Eq, other: sympy.Eq) -> bool:
    left, right = (side.lhs - side.rhs for side in (gold, other))
    return any(sympy.simplify(left - sign * right) == 0 for sign in (1, -1))


def _is_solvable(equation: sympy.Eq) -> bool:
    return bool(equation.free_symbols) and bool(sympy.solve(equation, equation.free_symbols))


def _has_both_cases(text: str) -> bool:
    letters = set(_COMMAND.sub("", text))
    return any(letter.isupper() and letter.lower() in letters for letter in letters)
