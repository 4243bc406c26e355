"""Compare two answers by their kinds; docs/rewards.md has the rules."""

from __future__ import annotations

from collections.abc import Sequence

from april_rl.answers import kinds
from april_rl.answers.clean import clean, squeeze
from april_rl.answers.expressions import (
    are_equal_decimals,
    are_equal_formulas,
    num_variables,
    rounds_to,
)
from april_rl.answers.extraction import normalise, what_it_says
from april_rl.answers.kinds import Answer
from april_rl.answers.reading import is_name, read
from april_rl.answers.statements import (
    are_joined_differently,
    connectives_of,
    in_order_of_names,
    leads_to_value,
    named_values,
    stated_sides,
)
from april_rl.answers.units import DEGREE, PERCENT

MOST_PLACES = 6  # decimal places that are compared
LONGEST = 1000  # longer answers, in characters, are compared as text only


def are_equal_answers(gold: str, text: str) -> bool:
    """Return whether two answers are equal; `gold` is the right one, as the data set has it.

    The response may state more than the gold: `x = 5` is equal to a gold 5, and 34 cm to 34.
    """
    gold, text = what_it_says(gold), what_it_says(text)
    if max(len(gold), len(text)) > LONGEST:
        return normalise(gold) == normalise(text)
    gold, text = clean(gold), clean(text)
    return bool(gold and text) and _are_equal(read(gold), read(text))


def _are_equal(gold: Answer, other: Answer) -> bool:
    if squeeze(gold.text) == squeeze(other.text):
        return True
    if named_values(gold) and named_values(other):
        return _are_equal_named_values(gold, other)
    match gold, other:
        case (kinds.Verbatim(), _) | (_, kinds.Verbatim()):
            return False
        case kinds.Approximation(), _:
            return _are_equal(gold.exact, other) or _are_equal(gold.rounded, other)
        case _, kinds.Approximation():
            return _are_equal(gold, other.exact) or (
                _is_rounded(other) and _are_equal(gold, other.rounded)
            )
        case kinds.Equation(), kinds.Equation():
            return _are_equal_equations(gold, other)
        case kinds.Equation(), _:
            return _states_value(gold) and _are_equal(gold.sides[-1], other)
        case _, kinds.Equation():
            return _is_stated(gold, other)
        case kinds.Congruence(), kinds.Congruence():
            return _are_equal_congruences(gold, other)
        case kinds.Number(), kinds.Congruence():
            return not (other.name and is_name(other.name.text)) and _are_equal(
                gold, other.residues
            )
        case (kinds.Congruence(), _) | (_, kinds.Congruence()):
            return False
        case (kinds.Quantity(), _) | (_, kinds.Quantity()):
            return _are_equal_quantities(gold, other)
        case kinds.Number(), kinds.Number():
            return _are_equal_numbers(gold, other)
        case kinds.Listing(), kinds.Listing():
            return _are_equal_lists(gold, other)
        case (kinds.Listing(), kinds.Number()) | (kinds.Number(), kinds.Listing()):
            return _are_equal_list_and_number(gold, other)
        case kinds.Table(), kinds.Table():
            return gold.environment == other.environment and _are_equal_tables(gold, other)
        case kinds.Choice(), _:
            return _are_equal_choices(gold, other)
        case _, kinds.Choice(content=Answer() as content):
            return _are_equal(gold, content)
        case kinds.Words(), kinds.Words():
            return _words(gold) == _words(other)
        case kinds.Based(), kinds.Number():
            return other.text.lstrip("0") == gold.digits
        case kinds.Based(), kinds.Based():
            return (gold.digits, gold.base) == (other.digits, other.base)
        case kinds.Time(), kinds.Time():
            return gold.numbers == other.numbers and not (
                gold.half and other.half and gold.half != other.half
            )
        case kinds.Proportion(), (kinds.Proportion() | kinds.Time(half="")):
            return _are_equal_ratios(gold, other)
        case (kinds.Based() | kinds.Time(), _) | (_, kinds.Based() | kinds.Time()):
            return False
        case (kinds.Proportion(), _) | (_, kinds.Proportion()) if _num_parts(gold, other) > 2:
            return False
    return are_equal_formulas(gold.text, other.text)


def _are_equal_named_values(gold: Answer, other: Answer) -> bool:
    are_joined_alike = connectives_of(gold) == connectives_of(other)
    return are_joined_alike and _are_equal_in_any_order(named_values(gold), named_values(other))


def _are_equal_numbers(gold: kinds.Number, other: kinds.Number) -> bool:
    """Compare two numbers: a fraction with a decimal as far as the decimal goes; decimals and whole
    numbers exactly, up to the sixth decimal place.
    """
    if gold.value == other.value:
        return True
    num_decimals = gold.is_decimal + other.is_decimal
    if num_decimals == 1:
        exact = gold if other.is_decimal else other
        return exact.value.denominator > 1 and are_equal_decimals(gold.value, other.value)
    return (
        num_decimals == 2
        and min(gold.num_places, other.num_places) >= MOST_PLACES
        and are_equal_decimals(gold.value, other.value)
    )


def _are_equal_quantities(gold: Answer, other: Answer) -> bool:
    """Compare values with units: a unit may be left out or added, but not differ.

    35 % is equal to 35 % and, since it is the same number, to 0.35. One side may leave the sign
    out, unless its number is below 1 (0.5 is not 0.5 %).
    """
    value, unit = _value_and_unit(gold)
    other_value, other_unit = _value_and_unit(other)
    if unit and other_unit and unit != other_unit:
        return False
    if PERCENT in (unit, other_unit) and unit != other_unit:
        plain, percentage = (value, other_value) if unit is None else (other_value, value)
        return _is_percentage(plain, percentage, may_be_small=unit == PERCENT)
    # An answer in degrees counts for radians, but not the other way: such a gold asks for degrees.
    if DEGREE in (unit, other_unit) and (unit is None or r"\circ" in other.text):
        written = rf"({value.text})^\circ" if unit else gold.text
        other_written = rf"({other_value.text})^\circ" if other_unit else other.text
        if are_equal_formulas(written, other_written):
            return True
    return _are_equal(value, other_value)


def _value_and_unit(answer: Answer) -> tuple[Answer, str | None]:
    if isinstance(answer, kinds.Quantity):
        return answer.value, answer.unit
    return answer, None


def _is_percentage(plain: Answer, percentage: Answer, *, may_be_small: bool) -> bool:
    if not isinstance(percentage, kinds.Number) or not isinstance(plain, kinds.Number):
        return _are_equal(percentage, plain) or are_equal_formulas(
            plain.text, rf"\frac{{{percentage.text}}}{{100}}"
        )
    if are_equal_decimals(percentage.value / 100, plain.value):
        return True
    is_large = abs(plain.value) >= 1
    return (may_be_small or is_large) and _are_equal_numbers(plain, percentage)


def _are_equal_lists(gold: kinds.Listing, other: kinds.Listing) -> bool:
    """Compare members: in any order in sets and in lists without brackets, otherwise in the given
    order.
    """
    if named_values(gold) or named_values(other):
        pair = in_order_of_names(gold, other)
        return pair is not None and _are_equal_rows(*pair)
    if are_joined_differently(gold, other):
        return False
    loose = ("", r"\{")
    if gold.opening in loose and other.opening in loose:
        expected = _without_repeats(gold.members)
        if len(expected) == len(gold.members):
            return _are_equal_in_any_order(expected, _without_repeats(other.members))
        return _are_equal_in_any_order(list(gold.members), list(other.members))
    brackets = {gold.opening + gold.closing, other.opening + other.closing}
    if "" in brackets and "()" in brackets:  # one of the two has no brackets
        if not gold.opening:
            return _are_equal_in_any_order(list(gold.members), list(other.members))
    elif len(brackets) > 1 and brackets != {"()", r"\langle\rangle"}:
        return False
    return len(gold.members) == len(other.members) and all(
        map(_are_equal, gold.members, other.members)
    )


def _without_repeats(members: Sequence[Answer]) -> list[Answer]:
    kept: list[Answer] = []
    for member in members:
        if not any(_are_equal(each, member) for each in kept):
            kept.append(member)
    return kept


def _are_equal_in_any_order(gold: list[Answer], other: list[Answer]) -> bool:
    if len(gold) != len(other):
        return False
    left = list(other)
    for member in gold:
        found = next((each for each in left if _are_equal(member, each)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _are_equal_list_and_number(gold: Answer, other: Answer) -> bool:
    """Compare a list with a number: with a decimal whose comma separates no members (3,14 for
    3.14), with a list that looks like a number (220,284), or as the only member of a set.
    """
    match gold, other:
        case kinds.Number(is_decimal=True), kinds.Listing():
            return other.text.replace(",", ".") == gold.text
        case kinds.Listing(), kinds.Number(is_ambiguous=True):
            return _are_equal_lists(gold, _as_list(other))
        case kinds.Number(is_ambiguous=True), kinds.Listing():
            return _are_equal_lists(_as_list(gold), other)
        case (kinds.Listing(opening=r"\{", members=(member,)), number) | (
            number,
            kinds.Listing(opening=r"\{", members=(member,)),
        ):
            return _are_equal(member, number)
    return False


def _as_list(number: kinds.Number) -> kinds.Listing:
    return kinds.Listing(number.text, "", tuple(map(read, number.text.split(","))), "")


def _are_equal_tables(gold: kinds.Table, other: kinds.Table) -> bool:
    """Compare cell by cell; the cases of a function may be in another order."""
    left = list(other.rows)
    for row in gold.rows:
        candidates = left if gold.environment == "cases" else left[:1]
        found = next((each for each in candidates if _are_equal_rows(row, each)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _are_equal_rows(gold: Sequence[Answer], other: Sequence[Answer]) -> bool:
    return len(gold) == len(other) and all(map(_are_equal, gold, other))


def _are_equal_equations(gold: kinds.Equation, other: kinds.Equation) -> bool:
    """Compare first and last sides, in either order, and what is stated between them, or as a whole
    where there are variables.
    """
    sides, other_sides = stated_sides(gold), stated_sides(other)
    if len(sides) > 2 and len(other_sides) > 2:
        return _are_equal_in_any_order(sides, other_sides)
    if (len(sides) > 2 and not leads_to_value(gold, sides[1:-1])) or (
        len(other_sides) > 2 and not leads_to_value(other, ())
    ):
        return False
    ends, other_ends = (gold.sides[0], gold.sides[-1]), (other.sides[0], other.sides[-1])
    if any(all(map(_are_equal, ends, pair)) for pair in (other_ends, other_ends[::-1])):
        return True
    names = [side.text for side in (*ends, *other_ends) if is_name(side.text)]
    return (
        len(gold.sides) == len(other.sides) == 2
        # Excludes f(x), f'(x) and dy/dx, which are not variables.
        and all(name.isalpha() for name in names)
        and num_variables(gold.text) > 0
        and num_variables(other.text) > 0
        and are_equal_formulas(gold.text, other.text)
    )


def _is_stated(gold: Answer, other: kinds.Equation) -> bool:
    """Return whether an equation states the value `gold`. Its last side does, unless the first
    one has a variable to solve for (2x = 4 states 2, not 4).
    """
    first, last = other.sides[0], other.sides[-1]
    if not is_name(first.text) and num_variables(first.text) == 1:
        return False
    is_turned = is_name(last.text) and not is_name(first.text)  # for example 5 = x
    return _are_equal(gold, first if is_turned else last)


def _states_value(gold: kinds.Equation) -> bool:
    first, last = gold.sides[0].text, gold.sides[-1].text
    return is_name(first) or num_variables(first) + num_variables(last) == 0


def _is_rounded(approximation: kinds.Approximation) -> bool:
    exact, rounded = approximation.exact, approximation.rounded
    exact = exact.sides[-1] if isinstance(exact, kinds.Equation) else exact
    if not isinstance(rounded, kinds.Number):
        return False
    return rounds_to(exact.text, rounded.value, rounded.num_places)


def _are_equal_congruences(gold: kinds.Congruence, other: kinds.Congruence) -> bool:
    if gold.name and other.name and not _are_equal(gold.name, other.name):
        return False
    if not _are_equal(gold.modulus, other.modulus):
        return False
    return _are_equal(_reduce(gold), _reduce(other))


def _reduce(congruence: kinds.Congruence) -> Answer:
    """Return the residues as the smallest non-negative whole numbers."""
    residues, modulus = congruence.residues, congruence.modulus
    if not isinstance(modulus, kinds.Number) or modulus.value <= 0:
        return residues
    members = residues.members if isinstance(residues, kinds.Listing) else (residues,)
    numbers = [member.value for member in members if isinstance(member, kinds.Number)]
    if len(numbers) < len(members):
        return residues
    return read(", ".join(map(str, sorted({number % modulus.value for number in numbers}))))


def _are_equal_choices(gold: kinds.Choice, other: Answer) -> bool:
    """Compare a letter of a multiple choice and what it stands for, as far as both have them."""
    if not isinstance(other, kinds.Choice):
        if gold.content is not None:
            return _are_equal(gold.content, other)
        return other.text.strip("()").upper() == gold.letter
    if gold.content is not None and other.content is not None:
        return gold.letter == other.letter and _are_equal(gold.content, other.content)
    return gold.letter == other.letter


def _are_equal_ratios(gold: kinds.Proportion, other: kinds.Proportion | kinds.Time) -> bool:
    parts = (
        [part.text for part in other.parts]
        if isinstance(other, kinds.Proportion)
        else list(map(str, other.numbers))
    )
    own = [part.text for part in gold.parts]
    return len(own) == len(parts) and all(
        are_equal_formulas(rf"({mine}) \cdot ({parts[0]})", rf"({theirs}) \cdot ({own[0]})")
        for mine, theirs in zip(own, parts, strict=True)
    )


def _num_parts(*answers: Answer) -> int:
    return max(len(answer.parts) for answer in answers if isinstance(answer, kinds.Proportion))


def _words(answer: Answer) -> str:
    return answer.text.casefold().replace("-", " ").rstrip(".")
