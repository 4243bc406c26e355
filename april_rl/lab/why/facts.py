"""Explanations in what a run left: settings, code, weights, rewards and prompts that changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain, compress
from operator import eq
from statistics import correlation, fmean

import yaml

from april_rl.lab.rehearsal.data_page import shared_ends
from april_rl.lab.replay.rewards import scored_again
from april_rl.lab.report.bands import BAD
from april_rl.lab.report.comparison import differing_keys, flat_settings
from april_rl.lab.why.case import Change, StepCase, Tested, with_prompts
from april_rl.training.learner.update_errors import MEAN
from april_rl.training.recorded_steps import RecordedStep
from april_rl.types import Prompt

_TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0)  # times that of the run
_EQUAL, _FLOOR = 1e-2, 1e-6  # relative and absolute differences that count as equal
_LEFT = 0.3  # share of a difference that an explanation may leave
_OTHER = 0.1  # share of responses with another reward from which it counts
_PAYS = 0.5  # correlation of reward and length
_AFFIX, _SHARED = 3, 0.25  # characters that a template adds, and the share of prompts with them
_UNSEEN = 0.3  # share of a prompt's tokens that no prompt before had
_FEW = 0.15  # share of unlike prompts that chance explains
_SERVERS = {"judge", "reward_model", "environment"}  # scoring again would need them
_RENDERED = ("template", "system_prompt", "instruction", "chat_template_kwargs")
# What settings decide, by their beginning.
_KINDS = {
    "optimizer.": "learning rate",
    **{f"data.{key}": "prompts" for key in _RENDERED},
    "data.": "data",
    "reward.": "reward",
    "rollout.temperature": "temperature",
    "algorithm.": "loss",
    "learner.": "loss",
}


def settings_before(case: StepCase) -> Iterator[Tested]:
    """Compare the settings of the checkpoint before the step with those that it had."""
    paths = (path / "config.yaml" for path in (case.base.path, case.settings_of))
    plain = [flat_settings(yaml.safe_load(path.read_text(encoding="utf-8"))) for path in paths]
    keys = [key for key in differing_keys(plain) if key.startswith(tuple(_KINDS))]
    if not keys:
        return
    kind = next(kind for start, kind in _KINDS.items() if keys[0].startswith(start))
    texts = [f"{key} {plain[0].get(key)} → {plain[1].get(key)}" for key in keys]
    name = f"settings changed after step {case.base.step} ({', '.join(texts)})"
    if not keys[0].startswith(("data.", "reward.")):
        old = [f"{key}={yaml.safe_dump(plain[0].get(key)).splitlines()[0]}" for key in keys]
        yield case.test(kind, Change(name, (*old,)))
        return
    is_at_once = case.base.step == case.step - 1
    yield Tested(kind, name, is_at_once or None, "no replay can undo what was sampled with them")


def learning_rate(case: StepCase) -> Iterator[Tested]:
    """Compare the learning rate with that of the steps before."""
    if (rate := case.symptom("loss/lr")) is not None:
        before = (rate.low * rate.high) ** 0.5
        name = f"the learning rate, {rate.value / before:.3g} times that of the steps before"
        yield Tested("learning rate", name, True, f"it was {before:.3g} until then")


def not_finite(case: StepCase) -> Iterator[Tested]:
    """Train each prompt alone, to find those whose loss or gradient is not finite."""
    if not case.again[BAD] or case.disagrees:
        return
    prompts = [scored.group.prompt for scored in case.recorded.groups]
    with case.learner() as learner:
        edits = [with_prompts(partial(eq, prompt)) for prompt in prompts]
        are_bad = [case.train(learner, edit=edit)[0][BAD] for edit in edits]
    bad = list(compress(prompts, are_bad))
    name = f"without {', '.join(f'prompt {prompt.id} ({prompt.source})' for prompt in bad[:3])}"
    name += f" and {len(bad) - 3} more" * (len(bad) > 3)
    yield case.test("not finite", Change(name, edit=with_prompts(lambda each: each not in bad)))


def other_engine(case: StepCase) -> Iterator[Tested]:
    """Find the weights, or the temperature, with which engine and learner differ as in the run."""
    ran, again = case.row.get(MEAN), case.again.get(MEAN, 0.0)
    was_learner = ran is not None and abs(ran - again) > _LEFT * ran + _FLOOR
    is_of_replay = ran is not None and ran < _LEFT * again - _FLOOR
    if is_of_replay or not (case.disagrees or was_learner):
        return
    target = (ran or 0.0) if was_learner else 0.0
    errors = {}
    for step in (case.step - 1, case.step - 2) if case.disagrees else ():
        with case.learner() as learner:
            older = case.train(learner, weights_of=step)[0][MEAN]
        errors["weights", f"an engine with the weights of version {step - 1}"] = older
    who = "a learner that computed" if was_learner else "an engine that sampled"
    left = {}
    for value in (factor * case.config.rollout.temperature for factor in _TEMPERATURES):
        setting = f"rollout.temperature={value:g}"
        left[value] = abs(case.metrics_with(Change(f"with {setting}", (setting,)))[MEAN] - target)
    value = min(left, key=lambda value: left[value])
    errors["temperature", f"{who} at temperature {value:g}"] = left[value]
    best = min(errors, key=lambda name: errors[name])
    for (kind, name), error in errors.items():
        text = f"it leaves {error:.2g} of {abs(again - target):.2g} nats of {MEAN}"
        explains = (kind, name) == best and error < _LEFT * abs(again - target)
        yield Tested(kind, name, explains, text)
    if case.disagrees and errors[best] >= _LEFT * again:
        text = "it is none of these"
        yield Tested("weights", "an engine with damaged weights or kernels", True, text)


def repeatable(case: StepCase) -> Iterator[Tested]:
    """Compare the step trained again with what the run wrote."""
    other = []
    for key in (BAD, MEAN, "loss/grad_norm", "loss/entropy", "loss/behaviour_kl"):
        ran, found = case.row.get(key), case.again.get(key)
        if ran is not None and found is not None:
            is_other = abs(ran - found) > max(_EQUAL * max(abs(ran), abs(found)), _FLOOR)
            other += [f"{key} was {ran:.3g} and is {found:.3g}"] * is_other
    name = "code, weights or memory that were others in the run than here"
    yield Tested("code", name, bool(other), ", ".join(other) or "trained again, it is equal")


def other_reward(case: StepCase) -> Iterator[Tested]:
    """Score the responses of the step, and of one before it, again."""
    reward, past = case.config.reward, list(case.past())
    functions = {reward.function, *(each.function for each in reward.functions.values())}
    if not past or functions & _SERVERS:
        return
    steps = [past[-1], (case.step, case.recorded)]
    found = [(_share_of_others(each, scored_again(each, case.config)), n) for n, each in steps]
    (least, _), (share, step) = sorted(found)
    text = f"scored again, {share:.0%} of the responses of step {step} get another one"
    explains = None if least > share / 2 > 0 else share > _OTHER
    yield Tested("reward", "a reward that was changed", explains, text)


def _share_of_others(recorded: RecordedStep, again: RecordedStep) -> float:
    """Return the share of responses with another reward."""
    pairs = zip(recorded.groups, again.groups, strict=True)
    rewards = (zip(was.rewards, now.rewards, strict=True) for was, now in pairs)
    return fmean(abs(a - b) > 1e-6 for a, b in chain.from_iterable(rewards))


def other_prompts(case: StepCase) -> Iterator[Tested]:
    """Leave out prompts unlike those before: they begin or end with another text, which several of
    them have; or they are longer, shorter, or of other tokens or sources.
    """
    past = [scored.group.prompt for _, each in case.past() for scored in each.groups]
    prompts = [scored.group.prompt for scored in case.recorded.groups]
    if not past:
        return
    head, tail = shared_ends([prompt.text for prompt in past])

    def ends(prompt: Prompt) -> tuple[tuple[int, str], ...]:
        return (0, prompt.text[: len(head) + _AFFIX]), (1, prompt.text[-len(tail) - _AFFIX :])

    usual = {end for prompt in past for end in ends(prompt)}
    new = Counter(end for prompt in prompts for end in ends(prompt) if end not in usual)

    def is_written_so(prompt: Prompt) -> bool:
        is_shared = max(new[end] for end in ends(prompt)) >= _SHARED * len(prompts)
        return not is_shared and prompt.text.startswith(head) and prompt.text.endswith(tail)

    lengths = [len(prompt.token_ids) for prompt in past]
    known = {token for prompt in past for token in prompt.token_ids}
    sources = {prompt.dataset for prompt in past}

    def is_of_kind(prompt: Prompt) -> bool:
        unseen = fmean(token not in known for token in prompt.token_ids)
        is_within = min(lengths) <= len(prompt.token_ids) <= max(lengths)
        return unseen <= _UNSEEN and is_within and prompt.dataset in sources

    for kind, name, keeps in (
        ("prompts", "prompts in another template", is_written_so),
        ("data", "data of another kind", is_of_kind),
    ):
        num_other = len(prompts) - sum(map(keeps, prompts))
        text = f"without {name} ({num_other} of {len(prompts)})"
        if num_other > len(prompts) / 2:
            yield Tested(kind, text, True, "there are too few others to compare")
        elif num_other > _FEW * len(prompts):
            yield case.test(kind, Change(text, edit=with_prompts(keeps)))


def length_pay(case: StepCase) -> Iterator[Tested]:
    """Ask whether longer responses to the same prompt are paid more."""
    found = []
    for scored in case.recorded.groups:
        lengths = [float(sample.num_tokens) for sample in scored.group.samples]
        if scored.has_signal and len({*lengths}) > 1:
            found.append(correlation(lengths, scored.rewards))
    if found:
        text = f"reward and length of the responses to a prompt correlate by {fmean(found):+.2f}"
        explains = (
            fmean(found) > _PAYS
            and case.symptom("rollout/response_tokens_mean", "rollout/truncated_frac") is not None
        )
        yield Tested("length", "a reward that pays for length", explains, text)


# The order is that of the answer: the first that explains is the reason.
FACTS = (
    *(learning_rate, settings_before, not_finite, other_engine, repeatable),
    *(other_reward, other_prompts, length_pay),
)
