"""The kinds of answers: one class each, with the parts that it consists of."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in its written form; the subclasses are its kinds."""

    text: str  # cleaned


@dataclass(frozen=True, slots=True)
class Verbatim(Answer):
    """An answer that is not understood as a whole."""


@dataclass(frozen=True, slots=True)
class Words(Answer):
    """Words of a language."""


@dataclass(frozen=True, slots=True)
class Expression(Answer):
    """Anything that the parser of LaTeX may read: a formula, an inequality, a union of sets."""


@dataclass(frozen=True, slots=True)
class Number(Answer):
    """A plain number."""

    value: Fraction
    is_decimal: bool  # written with a decimal point
    is_ambiguous: bool  # its commas may separate thousands or the members of a list

    @property
    def num_places(self) -> int:
        return len(self.text.partition(".")[2])


@dataclass(frozen=True, slots=True)
class Quantity(Answer):
    """A value with a unit or a percent sign."""

    value: Answer
    unit: str  # canonical, such as "cm^2" or "%"; "" for words such as "units"


@dataclass(frozen=True, slots=True)
class Listing(Answer):
    """Members in brackets, or without: a list, a set, a tuple or an interval."""

    opening: str  # "" for a list without brackets
    members: tuple[Answer, ...]
    closing: str
    connectives: tuple[str, ...] = ()  # those of "and", "or" that stand between the members


@dataclass(frozen=True, slots=True)
class Table(Answer):
    """A matrix, or the cases of a piecewise function."""

    environment: str
    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True, slots=True)
class Equation(Answer):
    """Two or more sides; `x \\in S` counts as an equation, too."""

    sides: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Approximation(Answer):
    """An exact value and the decimal that it is about."""

    exact: Answer
    rounded: Answer


@dataclass(frozen=True, slots=True)
class Congruence(Answer):
    """Residues and their modulus."""

    name: Answer | None  # the number that is congruent
    residues: Answer
    modulus: Answer


@dataclass(frozen=True, slots=True)
class Proportion(Answer):
    """The parts of a : b."""

    parts: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Time(Answer):
    """A time of the day or a duration."""

    numbers: tuple[int, ...]  # hours, minutes, and seconds if there are any
    half: str  # "am", "pm" or ""


@dataclass(frozen=True, slots=True)
class Based(Answer):
    """A number in a base."""

    digits: str
    base: str


@dataclass(frozen=True, slots=True)
class Choice(Answer):
    """A letter of a multiple choice, and the text after it."""

    letter: str
    content: Answer | None
