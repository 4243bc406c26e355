"""Procedural tasks as data: splits without common questions, and verifiers that are tried first."""

import json
import sys

import pytest

from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.procedural import check_verifier, draw_rows


def draw(task, *, split="train", run_seed=3, **args):
    chosen = PromptSetConfig(path=f"reasoning_gym:{task}", split=split, args=args)
    return draw_rows(chosen, key="data.path", seed=run_seed)


def test_rows_have_question_answer_and_the_entry_for_the_verifier():
    rows = draw("products", size=50)
    assert [len(values) for values in rows.values()] == [50, 50, 50]
    entry = json.loads(rows["entry"][0])
    assert entry["task"] == "products"
    assert (entry["question"], entry["answer"]) == (rows["prompt"][0], rows["answer"][0])
    assert entry["metadata"]["num_terms"] == 2


def test_training_and_test_share_no_question_even_when_there_are_few():
    """Fails when the splits differ only by their seed: there are 100 products of two digits."""
    train = set(draw("products", max_digits=1)["prompt"])
    test = set(draw("products", max_digits=1, split="test")["prompt"])
    assert len(train) > 60
    assert len(test) > 10
    assert not train & test


def test_the_run_seed_selects_the_training_rows_but_not_the_test_rows():
    assert draw("gcd", size=20) == draw("gcd", size=20)
    assert draw("gcd", size=20) != draw("gcd", size=20, run_seed=4)
    assert draw("gcd", split="test", run_seed=3) == draw("gcd", split="test", run_seed=4)


def test_a_mixture_draws_from_its_tasks_by_weight_and_each_is_scored_by_its_own_verifier():
    """Fails when a row names the mixture, whose verifier needs the drawn set."""
    mixed = [{"name": "products", "weight": 3, "config": {"max_digits": 1}}, {"name": "gcd"}]
    rows = draw("composite", size=200, datasets=mixed)
    tasks = [json.loads(entry)["task"] for entry in rows["entry"]]
    assert {*tasks} == {"products", "gcd"}
    assert 120 < tasks.count("products") < 180
    held_out = draw("composite", split="test", datasets=mixed)["prompt"]
    trained = draw("products", max_digits=1)["prompt"]
    assert not {*trained, *draw("gcd")["prompt"]} & {*held_out}


REFUSED = {
    "gold scores 0": ("rush_hour", {}, "gives 0.0 to its own answer"),
    "gold does not survive JSON": ("rearc", {}, "to its own answer"),
    "garbage scores 1": ("game_of_life_halting", {}, "gives 1 to the wrong answer 'this is not"),
    "zero scores 1": ("coin_flip", {}, "gives 1 to the wrong answer '0'"),
    "no such task": ("sums", {}, "no such task; the tasks are ab, acre"),
    "an empty mixture": ("composite", {}, r"rejects args=\{'size': 20\}"),
    "no such task in a mixture": (
        "composite",
        {"datasets": [{"name": "sums"}]},
        "rejects args=.*'sums'",
    ),
    "a wrong verifier in a mixture": (
        "composite",
        {"datasets": [{"name": "products"}, {"name": "coin_flip"}]},
        "of coin_flip: .* gives 1 to the wrong answer '0'",
    ),
    "no such setting": ("products", {"digits": 3}, r"no setting args\.digits; it has min"),
    "bad value": (
        "products",
        {"max_digits": -1},
        "rejects args=.*: max_digits must be .*; change them",
    ),
    "no number": ("products", {"size": "big"}, "args.size=big must be a whole number"),
    "no rows": ("products", {"size": 0}, "args.size=0 must be a whole number"),
    "a seed": ("products", {"seed": 1}, r"args\.seed=1 has no effect"),
    "another split": ("products", {"split": "dev"}, "splits train and test, got split=dev"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_task_that_cannot_be_trained_is_refused_with_its_name_and_the_reason(name):
    task, settings, reason = REFUSED[name]
    with pytest.raises(DataError, match=rf"data\.path=reasoning_gym:{task}.*{reason}"):
        draw(task, **{"size": 20, **settings})


def test_a_verifier_that_raises_on_wrong_answers_is_accepted():
    """`prime_factorization` raises on text that is not a product."""
    assert len(draw("prime_factorization", size=20)["prompt"]) == 20


def test_a_task_is_refused_if_any_tried_row_fails():
    """Fails when only the first row is scored."""
    rows = draw("products", size=3)
    entries = [json.loads(entry) for entry in rows["entry"]]
    check_verifier("products", entries, where="data.path=x")
    entries[2]["answer"] = None
    with pytest.raises(DataError, match=r"gives 0\.0 to its own answer 'None'"):
        check_verifier("products", entries, where="data.path=x")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"reasoning_gym:products needs .*reasoning_gym<0.2"):
        draw("products")
