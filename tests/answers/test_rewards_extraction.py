"""Where the answer of a response is read, and what happens with more than one answer."""

from __future__ import annotations

import re
import time

import pytest
from source_tree import ROOT

from april_rl.answers.extraction import extract_answer, gold_answer, normalise, stated_answers
from april_rl.config.choices import Extract
from april_rl.task.rewards.builtin.math_verify import score_math
from april_rl.task.rewards.check import gold_response

AUTO = {
    r"**Answer:** $34$": "34",
    r"Answer: \boxed{34}": "34",
    "**Answer: 34**": "34",
    "### answer : \\(34\\).": "34",
    "> Answer: $34.": "34",
    "\\boxed{33}\n\nAnswer: 34": "34",
    "Answer: 33\nso \\boxed{34}": "34",
    "Answer: $\\boxed{\\frac{1}\n{2}}$": "\\frac{1}\n{2}",
    r"it is \boxed{\boxed{34}}": "34",
    "The answer: 34": "34",
    "Answer:\n34": "34",
    "Answer:\n\n**\n\\[\n34\n\\]": "34",
    "So, Answer: 34": "34",
    "Answer: 33, or Answer: 34": "34",
    "Write 'Answer: 33'.\nAnswer: 34": "34",
    "\\boxed{34}\n\nYou asked for a last line 'Answer: ...'.": "34",
    '\\boxed{34}\n\n"Answer: $Answer" was the form.': "34",
    "\\boxed{34}\n\nExplanation of the final Answer: it is the sum": "34",
    "Answer: 34\n\nExplanation of my Answer: it is the sum": "34",
    "Answer: 34\n\nThis is why 'Answer: 34' is the last line.": "34",
    "\\boxed{33} comes first. Thus, the final Answer: 34": "34",
    "\\boxed{33} comes first. So Answer: 34": "34",
    "This is my Answer: 34": "34",
    "It ends with 'Answer: 34'": "34'",
    "Answer:": None,
    "so the answer: 34": None,
    "it is 34": None,
    "<think>\\boxed{33}</think>Answer: 34": "34",
    "\\boxed{33}</think>no idea": None,
    "<think>Answer: 34": None,
    "<think>a</think>Answer: 33<think>Answer: 34": None,
}


@pytest.mark.parametrize("response", AUTO)
def test_auto_reads_the_last_box_or_answer_line_after_the_thinking(response):
    assert extract_answer(response, "auto") == AUTO[response]


def documented_forms() -> dict[str, tuple[str, str, str]]:
    """Return the table of answer_forms.md by response: the correct answer, and the verdicts of a
    person and of our code.
    """
    text = (ROOT / "tests" / "answers" / "answer_forms.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(.*?)`(?: \(of `(.*?)`\))? \| (\w+) \| \**(\w+)\** \| \w+ \|", text, re.M
    )
    return {form.replace("⏎", "\n"): (gold or "34", *said) for form, gold, *said in rows}


FORMS = documented_forms()
# The answer is not in the requested form, or it is a chain of equations, of which math-verify takes
# the last.
UNLIKE_A_PERSON = {"Answer: 33 = 34", "So the answer: 34", "It is 34.", "The answer is 34."}


@pytest.mark.parametrize("response", FORMS)
def test_an_answer_to_the_prompt_of_dapo_is_judged_as_a_person_would(response):
    """Fails when a form that people accept is trained as wrong, or a hedge as correct."""
    gold, person, ours = FORMS[response]
    found = score_math(response, gold, soft_timeout_s=20)
    assert ("right" if found else "wrong") == ours
    assert (ours != person) == (response in UNLIKE_A_PERSON)


def test_the_table_of_forms_has_fifty_rows():
    assert len(FORMS) == 50
    assert set(FORMS) >= UNLIKE_A_PERSON


def test_the_examples_of_the_page_are_rows_of_the_table():
    text = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(.*?)` \| (right|wrong) \|$", text, re.M)
    assert len(shown) > 5
    assert [row for row in shown if FORMS[row[0].replace("⏎", "\n")][2] != row[1]] == []


NUMBERS = {
    "2 + 3 = 5.": "5",
    "1,234.50 dollars": "1,234.50",
    "x-5 = -5": "-5",
    "from 3-4": "4",
    "it is 3/4, that is .75": ".75",
    "1e6": "1e6",
    "is \N{MINUS SIGN}2": "-2",
    "1</think>none": None,
}


@pytest.mark.parametrize("response", NUMBERS)
def test_last_number_reads_signs_commas_decimals_and_fractions(response):
    assert extract_answer(response, "last_number") == NUMBERS[response]


def test_each_form_ignores_the_others():
    response = "Answer: 1\n\\boxed{2}\n3"
    found = {how.value: extract_answer(response, how.value) for how in Extract}
    assert found == {"boxed": "2", "answer_line": "1", "last_number": "3", "auto": "2"}


HEDGED = [
    (r"\boxed{3} or \boxed{4}", "auto"),
    (r"\boxed{4} or \boxed{3}", "boxed"),
    ("Answer: 3\nAnswer: 4", "answer_line"),
    ("Answer: 4\nAnswer: 3", "auto"),
    (r"Answer: \boxed{4} or \boxed{3}", "auto"),
    ("Answer: 3 or 4", "auto"),
    ("Answer: 3, 4", "auto"),
    ("Answer: $3$ or $4$", "auto"),
    ("Answer: $3$, $4$", "auto"),
    ("Answer: 3, or Answer: 4", "auto"),
    ("So, Answer: 4\nSo, Answer: 3", "auto"),
    ("Answer: 4\nSo, Answer: 3", "answer_line"),
    ("Answer: 3, as my Answer: 4", "auto"),
    ("Answer: 3 is my Answer: 4", "auto"),
    ("Answer: 4\nSo Answer: 3", "auto"),
    ("Answer: 3 not 4", "auto"),
    ("Answer: 3 and 4", "answer_line"),
    (r"\boxed{3, 4}", "boxed"),
    (r"Answer: 4} \boxed{3", "auto"),
]


@pytest.mark.parametrize(("response", "how"), HEDGED)
@pytest.mark.parametrize("answer", ["3", "4"])
def test_several_different_answers_are_wrong_even_if_one_is_right(response, how, answer):
    assert score_math(response, answer, how=how, soft_timeout_s=3) == 0.0


SAME = [
    r"\boxed{1/2} is \boxed{\frac12}",
    "Answer: 1/2\nAnswer: $0.5$.",
    r"\boxed{\dfrac{1}{2}}, so \boxed{\frac{1}{2}}",
    r"<think>\boxed{7}</think>\boxed{1/2}",
    "\\boxed{7} of them\nAnswer: 1/2",  # the box is an intermediate result in another form
]


@pytest.mark.parametrize("response", SAME)
def test_one_answer_may_be_stated_in_several_ways(response):
    assert score_math(response, "1/2", soft_timeout_s=3) == 1.0


@pytest.mark.parametrize("gold", ["34", r"\boxed{34}", "$34$", "-0.5", r"\frac{1}{2}"])
@pytest.mark.parametrize("how", [Extract.auto, Extract.boxed, Extract.answer_line])
def test_the_answer_of_the_data_set_is_right_in_the_form_that_is_read(gold, how):
    response = gold_response(gold, how)
    assert score_math(response, gold, how=how.value, soft_timeout_s=3) == 1.0


@pytest.mark.parametrize("how", [how.value for how in Extract])
@pytest.mark.parametrize(
    "hostile",
    [
        r"\boxed{",
        r"\boxed ",
        "\\",
        "{",
        r"\boxed{1}",
        ",234",
        "Answer: 3\n",
        "Answer:\n",
        "Answer: $",
        "the final answer",
        "34 no ",
        "answer ",
        "$",
        "* ",
        "1/",
        "1e",
        "-",
        "<think>",
        ".",
        "Answer:",
    ],
)
def test_extraction_takes_linear_time_on_hostile_responses(how, hostile):
    """A quadratic pattern needs minutes for this; linear ones need a second, even on a busy
    machine.
    """
    response = hostile * (100_000 // len(hostile))
    start_s = time.process_time()
    for text in stated_answers(response, how)[-1:]:
        normalise(text)
    stated_answers("Answer: " + response + "x", how)
    assert time.process_time() - start_s < 20.0


def test_normalising_keeps_what_an_answer_means():
    assert normalise(r"$ \left( 1,000 , \dfrac{1}{2} \right) $.") == normalise(
        r"(1000,\frac{1}{2})"
    )
    assert len({normalise(text) for text in ("x^2", "x_2", "2x", "(1,2)", "12", "-12")}) == 6


@pytest.mark.parametrize(
    "box",
    [
        "",
        " ",
        "...",
        r"\ldots",
        "?",
        "answer",
        r"\text{your answer}",
        "ANSWER",
        r"\square",
        r"\_\_",
    ],
)
@pytest.mark.parametrize("how", ["auto", "boxed", "answer_line"])
def test_a_box_or_line_that_repeats_the_instruction_is_no_answer(box, how):
    form = "Answer: {}" if how == "answer_line" else r"\boxed{{{}}}"
    instruction, answer = form.format(box), form.format("42")
    assert stated_answers(f"Write it as {instruction}.\nSo {answer}", how)[-1] == "42"
    assert stated_answers(f"{answer}\n\nIt stands in {instruction}", how)[-1] == "42"
    assert score_math(f"{instruction}\n{answer}\n{instruction}", "42", soft_timeout_s=20) == 1.0
    assert stated_answers(instruction, "boxed") == []


@pytest.mark.parametrize(
    "box", [r"\emptyset", r"\{\}", r"\infty", "∞", "x", "no answer", r"\pi", "0"]
)
def test_an_unusual_box_is_still_an_answer(box):
    assert stated_answers(rf"\boxed{{{box}}}", "boxed") == [box]


@pytest.mark.parametrize(
    ("response", "answer"),
    {
        r"$\boxed 4$": "4",
        r"\boxed4.": "4",
        r"\boxed -12": "-12",
        r"\boxed 1/2": "1/2",
        r"\fbox{42}": "42",
        r"\boxed B": "B",
        r"Write it in \boxed and stop.": None,
    }.items(),
)
def test_a_box_without_braces_is_a_box(response, answer):
    assert extract_answer(response, "boxed") == answer


@pytest.mark.parametrize(
    ("answer", "gold"),
    {
        r"So $x=\boxed{2}$ or $x=\boxed{5}$.": "2, 5",
        r"\boxed{1}\boxed{2}": "1, 2",
        r"$\boxed 3$": "3",
        "First $\\boxed{7}$ is odd.\n\nThen it is $\\boxed{8}$.": "8",
        r"\boxed{2}, which is again \boxed{2}": "2",
    }.items(),
)
def test_the_data_sets_answer_in_several_boxes_of_a_line_is_a_list(answer, gold):
    assert gold_answer(answer) == gold


@pytest.mark.parametrize(
    ("response", "is_right"),
    {
        r"$\boxed{2}$ and $\boxed{5}$": True,
        r"\boxed{5}, \boxed{2}": True,
        "Answer: 2\nAnswer: 5": True,
        r"\boxed{2}": False,
        r"\boxed{2} and \boxed{6}": False,
        r"\boxed{2}, \boxed{5} or \boxed{6}": False,
        r"\boxed{2, 5} and \boxed{3}": False,
    }.items(),
)
def test_a_list_may_be_given_in_several_boxes(response, is_right):
    assert score_math(response, "2, 5", soft_timeout_s=20) == float(is_right)
    assert score_math(response, "2", soft_timeout_s=20) == float(response == r"\boxed{2}")
