"""Explanations that are changes: what might have made the step a healthy one."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from april_rl.config.checks import OWN_FUNCTION
from april_rl.lab.why.case import Change, Keeps, StepCase, Tested, without

_LONG, _STRONG = 0.1, 10  # share of the longest responses; responses that pull most
_RECENT = 10  # steps whose gradient norms are usual


def remedies(case: StepCase) -> Iterator[Tested]:
    """Test changes of settings where the update has decided a symptom, and of the samples."""
    if case.is_of_update:
        for kind, name, settings in _settings(case):
            yield case.test(kind, Change(f"with {name}", settings))
    samples = [sample for scored in case.recorded.groups for sample in scored.group.samples]
    long = sorted(sample.num_tokens for sample in samples)[-max(1, int(_LONG * len(samples)))]
    strong = {response.sample.id for response in case.responses[:_STRONG]}
    first = {(s.prompt.id, s.token_ids.tobytes()): s.id for s in reversed(samples)}
    keepers: dict[str, Keeps] = {
        "responses that were cut off": lambda _, s: s.finish_reason != "length",
        "the longest tenth": lambda _, s: s.num_tokens < long,
        "repeated responses": lambda _, s: first[s.prompt.id, s.token_ids.tobytes()] == s.id,
        "the ten responses that pull most": lambda _, s: s.id not in strong,
    }
    for name, keeps in keepers.items() if case.testable else ():
        yield case.test("samples", Change(f"without {name}", edit=without(keeps)))


def _settings(case: StepCase) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    algorithm = case.config.algorithm
    if OWN_FUNCTION.fullmatch(algorithm.loss):
        yield "loss", "the built-in loss", ("algorithm.loss=ppo_clip",)
    if OWN_FUNCTION.fullmatch(algorithm.advantage):
        yield "loss", "the built-in advantage", ("algorithm.advantage=grpo",)
    yield "learning rate", "a third of the rate", (f"optimizer.lr={case.config.optimizer.lr / 3}",)
    norms = [value for step, value in case.run.series("loss/grad_norm") if step < case.step]
    if norms:
        usual = f"optimizer.max_grad_norm={median(norms[-_RECENT:]):.4g}"
        yield "gradient", "the gradient clipped to its usual norm", (usual,)
    ends = {"low": algorithm.clip_low, "high": algorithm.clip_high}
    half = (f"algorithm.clip_{end}={bound / 2}" for end, bound in ends.items())
    yield "clip", "half of the clip range", (*half,)
    yield "staleness", "hardly any weight for old tokens", ("learner.age_decay=0.001",)
    own = ("algorithm.ratio=proximal", "algorithm.correction=none")
    yield "correction", "the learner's log-probabilities for the engine's", own
    yield "kl", "a KL term", ("algorithm.kl=k3", "algorithm.kl_coefficient=0.05")
