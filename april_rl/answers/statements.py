"""Read what equations and lists say beside their values: the names, their order, "and" or "or", and
the middle of a chain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_letters
from typing import TypeAlias

from april_rl.answers import kinds
from april_rl.answers.expressions import are_equal_formulas, num_variables
from april_rl.answers.kinds import Answer
from april_rl.answers.reading import is_name, name_of

Members: TypeAlias = Sequence[Answer]
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in|notin)(?![A-Za-z])")
_ROOTS = frozenset(("x_1", "x_2"))  # two roots, which have no order


def named_values(answer: Answer) -> list[Answer]:
    """Return the equations of values with different names; [] for any other answer.

    (x, y) = (1, 2) is x = 1, y = 2.
    """
    match answer:
        case kinds.Equation(sides=(kinds.Listing() as names, kinds.Listing() as values)):
            if len(names.members) != len(values.members) or not is_name(names.text):
                return []
            pairs = zip(names.members, values.members, strict=True)
            return [kinds.Equation(f"{pair[0].text} = {pair[1].text}", pair) for pair in pairs]
        case kinds.Listing(opening="" | r"\{", members=members):
            named = {name_of(member) for member in members}
            is_named = "" not in named and len(named) > 1 and named != _ROOTS
            return list(members) if is_named else []
    return []


def in_order_of_names(gold: kinds.Listing, other: kinds.Listing) -> tuple[Members, Members] | None:
    """Return the members in pairs where one of the two names its values; None if it is not known
    which belong together.

    The values are in the order of the names; neighbours in the alphabet, such as x, y, z, are in
    this order, except where a list without brackets follows the order of the gold.
    """
    is_gold_named = bool(named_values(gold))
    named, bare = (gold, other) if is_gold_named else (other, gold)
    if bare.opening not in ("", "(", r"\langle") or connectives_of(named) != ("and",):
        return None
    members = list(named.members)
    is_alphabet = "".join(sorted(map(name_of, members))) in ascii_letters
    if is_alphabet and not (is_gold_named and not bare.opening):
        members.sort(key=name_of)
    return (members, bare.members) if is_gold_named else (bare.members, members)


def connectives_of(answer: Answer) -> tuple[str, ...]:
    """Return how named values are joined; a comma is an "and"."""
    return (isinstance(answer, kinds.Listing) and answer.connectives) or ("and",)


def are_joined_differently(gold: kinds.Listing, other: kinds.Listing) -> bool:
    """Return whether one says "and" and the other "or", which are the same between values only."""
    if not (gold.connectives and other.connectives):
        return False
    members = (*gold.members, *other.members)
    names = {name_of(member) for member in members if isinstance(member, kinds.Equation)}
    are_values = len(names) <= 1 and "" not in names
    are_values = are_values and not any(
        isinstance(member, kinds.Words) or _RELATION.search(member.text) for member in members
    )
    return not are_values and (gold.connectives != other.connectives or len(gold.connectives) > 1)


def stated_sides(equation: kinds.Equation) -> list[Answer]:
    """Return the sides of a chain but those in its middle that are numbers or equal to an end."""
    first, *middle, last = equation.sides
    stated = [
        side
        for side in middle
        if (is_name(side.text) or num_variables(side.text) or isinstance(side, kinds.Verbatim))
        and not any(are_equal_formulas(side.text, end.text) for end in (first, last))
    ]
    return [first, *stated, last]


def leads_to_value(equation: kinds.Equation, middle: Members) -> bool:
    """Return whether a chain is about the value of its first side, and its middle is not another
    name: A = ab = 12, not AB = CD = 5.
    """
    first, last = equation.sides[0].text, equation.sides[-1].text
    is_value = is_name(first) and num_variables(last) == 0
    return is_value and not any(is_name(side.text) for side in middle)
