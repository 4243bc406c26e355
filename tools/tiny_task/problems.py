"""Sums with worked solutions: how problems are drawn, and the two styles of solving them.

A prompt labels its operands, `a7+b5+c9=`. A thorough solution adds them one after another and boxes
the total, `a7 b5=12 c9=21 \boxed{21}`; a hasty one stops early and boxes the sum so far, `a7 b5=12
\boxed{12}`. After supervision on both, a policy has both styles, and reinforcement learning has to
find out which one pays. A short solution is never right: every operand counts. The number of
operands follows a Pareto distribution, so the lengths of responses have a long tail.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random

LABELS = string.ascii_lowercase
MIN_OPERANDS = 4
MAX_OPERANDS = len(LABELS)
# P(a problem has more than n operands) = (MIN_OPERANDS / n) ** TAIL_EXPONENT
TAIL_EXPONENT = 1.8
LARGEST_OPERAND = 9
HASTY_FRACTION = 0.5  # share of the worked solutions

NUM_RL_PROBLEMS = 20_000
NUM_HELD_OUT = 256

_HELD_OUT_SEED = "held out"
_TRAINING_SEED = "training"
# The warm start trains on other problems than RL.
_RL_SEED, _WARM_START_SEED = 0, 1


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum to compute."""

    operands: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """Return the text that the model sees, such as `a7+b12+c9=`."""
        return (
            "+".join(f"{label}{n}" for label, n in zip(LABELS, self.operands, strict=False)) + "="
        )

    @property
    def answer(self) -> str:
        """Return the total as text."""
        return str(sum(self.operands))


def draw_problem(random: Random) -> Problem:
    """Draw a problem; long ones are rarer and harder."""
    drawn = int(MIN_OPERANDS * random.paretovariate(TAIL_EXPONENT))
    num_operands = min(drawn, MAX_OPERANDS)
    return Problem(tuple(random.randint(1, LARGEST_OPERAND) for _ in range(num_operands)))


def worked_solution(
    problem: Problem, random: Random, *, hasty_fraction: float = HASTY_FRACTION
) -> str:
    """Return a solution in one of the two styles, hasty with probability `hasty_fraction`."""
    num_terms = len(problem.operands)
    if random.random() < hasty_fraction:
        num_terms = random.randrange(1, num_terms)
    return solution(problem, num_terms)


def solution(problem: Problem, num_terms: int) -> str:
    """Return the first `num_terms` operands added one after another, with their sum in a box."""
    total = problem.operands[0]
    steps = [f"{LABELS[0]}{total}"]
    for label, operand in zip(LABELS[1:], problem.operands[1:num_terms], strict=False):
        total += operand
        steps.append(f"{label}{operand}={total}")
    return f"{' '.join(steps)} \\boxed{{{total}}}"


def held_out_problems(count: int) -> list[Problem]:
    """Return the first `count` problems reserved for evaluation; they are distinct and always the
    same.
    """
    random = Random(_HELD_OUT_SEED)
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problems[draw_problem(random)] = None
    return list(problems)


def training_problems(count: int, *, seed: int, held_out: list[Problem]) -> list[Problem]:
    """Return `count` problems, none in `held_out`; equal seeds give equal problems, short ones may
    repeat.
    """
    random = Random(f"{_TRAINING_SEED} {seed}")
    kept_out = frozenset(held_out)
    problems: list[Problem] = []
    while len(problems) < count:
        problem = draw_problem(random)
        if problem not in kept_out:
            problems.append(problem)
    return problems


def rl_problems() -> list[Problem]:
    """Return the problems of builtin:arithmetic, none of them held out."""
    held_out = held_out_problems(NUM_HELD_OUT)
    return training_problems(NUM_RL_PROBLEMS, seed=_RL_SEED, held_out=held_out)


def warm_start_problems(count: int) -> list[Problem]:
    """Return `count` problems for supervised training, none of them held out."""
    held_out = held_out_problems(NUM_HELD_OUT)
    return training_problems(count, seed=_WARM_START_SEED, held_out=held_out)
