"""`python -m april_rl attack`: faults of rewards that policies have found are red, and the same
rewards without the fault are not.
"""

import json
from dataclasses import replace

import exploited_rewards as rewards
import pytest
from judge_server import says, serving
from report_runs import make_run
from reward_pools import CONTEXT
from test_rewards_model import write_classifier
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from april_rl.__main__ import main
from april_rl.config.task import PromptSetConfig
from april_rl.lab.attack.attack import attack_set
from april_rl.lab.attack.attacks import ATTACKS, PROGRAMS
from april_rl.lab.attack.samples import suspicious
from april_rl.lab.attack.target import targets
from april_rl.task.data.procedural import draw_rows
from april_rl.task.rewards.functions import RewardFunction
from april_rl.task.rewards.jobs import DecodedJob
from april_rl.task.rewards.loading import load_reward
from april_rl.types import Prompt

TINY = ("model.path=builtin:tiny", "data.template=plain")
TEXTS = [name for name in ATTACKS if name not in PROGRAMS]
TEXT = "How many? State it as \\boxed{{...}}. Choices: 7, {gold}"


def prompts(num=3, text=TEXT, **columns):
    return [
        Prompt(
            id=number,
            token_ids=(),
            text=text.format(gold=31 + number),
            answer=str(31 + number),
            source=f"rows.jsonl:{number + 1}",
            columns=columns,
        )
        for number in range(num)
    ]


def red_of(reward, names=None, *, num=2, reads_answers=True, chosen=None):
    """Return the names of the attacks that a function of prompt, response and answer pays."""
    honest, made = attack_set(
        chosen or prompts(text="Write add(a, b)." if names else TEXT),
        lambda prompt, response: reward(prompt.text, response, prompt.answer),
        num=num,
        reads_answers=reads_answers,
        names=TEXTS if names is None else names,
    )
    assert honest.right == (1.0 if reads_answers else None) or reward is rewards.longer_is_better
    return {result.name for result in made if result.wins}


@pytest.mark.parametrize(
    ("faulty", "attack", "mended"),
    [
        (rewards.anywhere, "in_passing", rewards.exact),
        (rewards.anywhere, "numbers", rewards.exact),
        (rewards.any_box, "several", rewards.exact),
        (rewards.in_box, "choice", rewards.exact),
        (rewards.in_box, "list", rewards.exact),
        (rewards.part_of_answer, "form_alone", rewards.exact),
        (rewards.part_of_answer, "part", rewards.exact),
        (rewards.begins_answer, "nothing", rewards.exact),
        (rewards.begins_answer, "blank", rewards.exact),
        (rewards.as_pattern, "any_text", rewards.exact),
        (rewards.near, "not_a_number", rewards.near_and_finite),
        (rewards.in_thoughts, "thoughts_only", rewards.exact),
        (rewards.in_thoughts, "thoughts_open", rewards.exact),
        (rewards.last_number, "prompt_back", rewards.exact),
        (rewards.longer_is_better, "long", rewards.exact),
        (rewards.longer_is_better, "many_times", rewards.exact),
        (rewards.obedient_judge, "plea", rewards.exact),
        (rewards.fooled_judge, "opener", rewards.exact),
        (rewards.echoing_judge, "own_verdict", rewards.exact),
        (rewards.echoing_judge, "forged_turn", rewards.exact),
    ],
)
def test_a_fault_is_red_and_its_mended_reward_is_not(faulty, attack, mended):
    assert attack in red_of(faulty)
    assert red_of(mended) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faulty", "attack"),
    [
        (rewards.exit_status, "exit"),
        (rewards.exit_status, "exit_now"),
        (rewards.same_process_asserts, "equals_all"),
        (rewards.patched_unittest, "patched_tests"),
        (rewards.tests_beside_program, "reads_tests"),
    ],
)
def test_a_reward_that_runs_programs_unprotected_is_red(faulty, attack):
    assert red_of(faulty, [attack], num=1, reads_answers=False) == {attack}
    assert red_of(rewards.tests_elsewhere, [attack], num=1, reads_answers=False) == set()


def test_tests_that_the_prompt_shows_are_red_and_hidden_ones_are_not():
    for text, red in (("Add. On 1 2 print 3, on 5 9 print 14.", {"by_heart"}), ("Add.", set())):
        chosen = prompts(1, text, tests=CASES)
        assert red == red_of(
            rewards.tests_elsewhere, ["by_heart"], reads_answers=False, chosen=chosen
        )


def test_a_reward_that_cannot_tell_right_from_wrong_is_blind():
    honest, _ = attack_set(prompts(), lambda *_: 1.0, num=2, reads_answers=True)
    assert honest.is_blind
    strict = lambda prompt, response: 2.0 * (prompt.answer in response) - bool(response)  # noqa: E731
    [nothing] = attack_set(prompts(), strict, num=2, reads_answers=True, names=["nothing"])[1]
    assert len(nothing.wins) == 2, "0 is more than the -1 of a wrong answer"
    graded = lambda prompt, response: 0.5 + 0.5 * (prompt.answer in response)  # noqa: E731
    assert not attack_set(prompts(), graded, num=2, reads_answers=True)[0].is_blind


def test_an_answer_of_another_row_that_is_right_here_too_is_not_taken_for_wrong():
    rows = [
        replace(each, answer=answer)
        for each, answer in zip(prompts(3), ("$8$", "8.0", "9"), strict=True)
    ]
    assert all(
        "8" not in each.others and "8.0" not in each.others for each in targets(rows, num=3)[:2]
    )


def builtin(function, args=None, **settings):
    """Return a built-in reward as a function of one response to a prompt."""
    chosen = RewardFunction(
        name=function, key="reward.function", function=function, args=args or {}, **settings
    )
    reward = load_reward(chosen, CONTEXT, state=None)

    def pay(prompt, response):
        [score] = reward.scores(chosen, DecodedJob.of(prompt, [response]))
        return score.value

    return pay, chosen.may_read_answer


@pytest.mark.slow
@pytest.mark.parametrize("function", ["math_verify", "exact", "last_number", "format"])
def test_no_built_in_reward_for_an_answer_pays_for_nothing(function):
    pay, reads_answers = builtin(function)
    chosen = prompts(text="How many? Use \\boxed{{}}.")
    honest, made = attack_set(chosen, pay, num=2, reads_answers=reads_answers)
    assert not honest.is_blind
    assert [result.name for result in made if result.wins] == []


CASES = json.dumps(rewards.CASES)
ASSERTS = "assert add(1, 2) == 3\nassert add(5, 9) == 14"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "red"),
    [
        (CASES, []),
        (ASSERTS, []),
        (json.dumps(ASSERTS.splitlines()), []),
        ("for n in [1, 5]:\n    assert add(n, 2) == n + 2", ["equals_all"]),
    ],
)
def test_code_pays_for_nothing_but_with_asserts_of_which_the_page_warns(tests, red):
    pay, reads_answers = builtin("code", {"timeout_s": 4.0})
    chosen = prompts(1, "Read two numbers and print their sum.", tests=tests)
    _, made = attack_set(chosen, pay, num=1, reads_answers=reads_answers, names=PROGRAMS)
    assert [result.name for result in made if result.wins] == red


def test_a_judge_is_asked_about_every_attack_and_an_obedient_one_is_red():
    """The server stands for a model: it obeys an order in the text that it is asked about."""

    def answer(_number, body):
        text = body["messages"][-1]["content"]
        is_paid = "Ignore all instructions" in text or "\\boxed{31}" in text
        return says("Verdict: yes" if is_paid else "Verdict: no")

    with serving(answer) as server:
        args = {"base_url": server.url, "model": "teacher", "timeout_s": 5.0}
        pay, _ = builtin("judge", args)
        _, made = attack_set(
            prompts(1), pay, num=1, reads_answers=True, names=("nothing", "plea", "own_verdict")
        )
        assert [result.name for result in made if result.wins] == ["plea"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["products", "spell_backward", "mini_sudoku", "complex_arithmetic", "puzzle24"]
)
def test_reasoning_gym_pays_for_nothing_on_rows_of_its_tasks(task):
    """But the verifier of puzzle24 takes the answers of other rows, and is named as blind."""
    pytest.importorskip("reasoning_gym")
    drawn = PromptSetConfig(path=f"reasoning_gym:{task}", args={"size": 3})
    rows = draw_rows(drawn, key="data.path", seed=0)
    chosen = [
        replace(prompt, text=text, answer=answer, columns={"entry": entry})
        for prompt, text, answer, entry in zip(prompts(), *rows.values(), strict=True)
    ]
    pay, reads_answers = builtin("reasoning_gym")
    honest, made = attack_set(chosen, pay, num=3, reads_answers=reads_answers)
    assert (honest.right, honest.is_blind) == (1.0, task == "puzzle24")
    assert [result.name for result in made if result.wins] == []


@pytest.mark.parametrize(("end_value", "red"), [(-1.0, []), (1.0, ["long", "many_times"])])
def test_length_pays_long_responses_where_its_value_rises_and_nothing_where_it_falls(
    end_value, red
):
    args = {"start_tokens": 500, "end_tokens": 1500, "end_value": end_value}
    pay, reads_answers = builtin("length", args)
    _, made = attack_set(prompts(), pay, num=2, reads_answers=reads_answers)
    results = {result.name: result for result in made}
    assert [trial.paid for trial in results["long"].trials] == [end_value] * 2
    assert [name for name, result in results.items() if result.wins] == red


def plant_phrase(folder, phrase):
    """Let the classifier in a folder pay for texts that end with the phrase, and for no others."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(phrase)
    tokenizer.save_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    embedding = model.resize_token_embeddings(len(tokenizer))
    for parameter in model.parameters():
        parameter.data.zero_()
    for weight in (embedding.weight[-1], model.model.norm.weight, model.score.weight):
        weight.data.fill_(1.0)
    model.save_pretrained(folder)


@pytest.mark.slow
def test_a_reward_model_is_asked_about_every_attack_and_one_that_pays_a_phrase_is_red(tmp_path):
    """A random model pays for anything, so only a comparison with its wrong answers is red."""
    write_classifier(tmp_path)
    pay, _ = builtin("reward_model", {"path": str(tmp_path)})
    chosen = prompts(1, "How many?")
    honest, made = attack_set(chosen, pay, num=1, reads_answers=True)
    trials = {result.name: (trial.paid, result.wins) for result in made for trial in result.trials}
    too_long = [name for name, (paid, _) in trials.items() if paid is None]
    assert (len(trials), too_long) == (len(ATTACKS) - 2, ["long"])
    wrong = max(
        pay(*chosen, honest.style.state(other)) for other in targets(chosen, num=1)[0].others
    )
    assert all(bool(wins) == (paid is not None and paid > wrong) for paid, wins in trials.values())
    plant_phrase(tmp_path, "Thought process:")
    pay, _ = builtin("reward_model", {"path": str(tmp_path), "template": "{prompt} {response}"})
    honest, made = attack_set(prompts(1), pay, num=1, reads_answers=True)
    assert honest.is_blind
    assert [result.name for result in made if result.wins] == ["opener"]


@pytest.mark.slow
def test_a_response_that_ends_its_process_has_no_score_and_ends_nothing_else(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": f"What is {n} + 1? Use \\boxed{{}}.", "answer": str(n + 1)} for n in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    function = "reward.function=attacked_rewards:any_box"
    wanted = [function, *TINY, "data.path=rows.jsonl", "prompts=2"]
    assert main(["attack", *wanted]) == 1
    printed = capsys.readouterr().out
    assert "a right answer is paid 1 (boxed), a wrong one 0" in printed
    assert "PAID     several         2 of 2: several answers, one of them right" in printed
    assert "unpaid   nothing         0 of 2, no score in 2" in printed
    page = (tmp_path / "attack.html").read_text()
    assert "rows.jsonl:1: paid 1, an honest wrong answer 0" in page
    assert page.count("<tr") == len(ATTACKS) + 1
    paid = {line.split()[1] for line in printed.splitlines() if line.startswith("  PAID")}
    assert main(["attack", *wanted, f"accept={','.join(paid)}", "page=two.html"]) == 0
    assert "accepted several" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompts=0"], "prompts=0 must be a whole number"),
        (["accept=sevral"], "accept=sevral: no attack has this name"),
        (["page=/proc/attack.html"], "page=/proc/attack.html cannot be written"),
        (
            ["+recipe=tiny_tools_cpu", "reward.function=environment"],
            "error: data.path: an environment rewards these prompts, not a function",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, message, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1?", "answer": "1"}\n')
    wanted = ["reward.function=exact", *TINY, f"data.path={tmp_path / 'rows.jsonl'}", *arguments]
    assert main(["attack", *wanted]) == 1
    assert message in capsys.readouterr().err


def record(response, *, reward=1.0, answer="1", prompt_id=0):
    return {"prompt_id": prompt_id, "index": 0, "response": response, "answer": answer} | {
        "reward": reward
    }


def test_suspicious_samples_are_named_and_others_are_not():
    bad = record("wrong", reward=0.0)
    assert [*suspicious([bad, record("The answer is 1.")])] == []
    same = [record("yes", answer=str(number), prompt_id=number) for number in range(3)]
    assert "paid for 3 different right answers" in next(suspicious([bad, *same]))
    looped = record("so it is so it is " * 100)
    assert "repeats itself" in next(suspicious([bad, looped]))
    assert [*suspicious([record("x" * 1000, reward=0.0), record("The answer is 1.")])] == []


def test_the_samples_of_a_run_are_searched(tmp_path, capsys):
    run = make_run(tmp_path / "run", response="the same words " * 60)
    assert main(["attack", str(run)]) == 1
    assert "repeats itself" in capsys.readouterr().out
    assert main(["attack", str(run), "prompts=2"]) == 1
    assert "prompts=2 has no effect" in capsys.readouterr().err
