"""The answer to `python -m april_rl why RUN`: what left its band first, and what explains it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from april_rl.errors import RunError
from april_rl.lab.replay.replay import Say
from april_rl.lab.replay.responses import TrainedResponse
from april_rl.lab.report.bands import Departure, departure_line, departures
from april_rl.lab.report.run_files import RunFiles
from april_rl.lab.why.case import StepCase, Tested
from april_rl.lab.why.facts import FACTS
from april_rl.lab.why.remedies import remedies

NUM_SHOWN = 10  # responses


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyAnswer:
    """Metrics that left their bands, tested explanations, and the responses of the step."""

    symptoms: Sequence[Departure]
    tests: Sequence[Tested] = ()
    responses: Sequence[TrainedResponse] = ()  # those that pull most at the update first
    model: str = ""  # whose tokenizer they have
    versions: str = ""  # which policies sampled the tokens of the step
    untested: str = ""  # why the step cannot be trained again

    @property
    def reason(self) -> Tested | None:
        return next((each for each in self.tests if each.explains), None)

    def lines(self) -> Iterator[str]:
        """Yield the answer in about five lines."""
        if not self.symptoms:
            yield "no metric left its band: the range of its own past, widened by its width"
            return
        yield f"at {departure_line(self.symptoms)}"
        if self.untested:
            yield f"not tested: {self.untested}"
            return
        if self.reason is None:
            yield "no explanation that was tried removes it, so that the reason is not known"
        else:
            yield f"what explains it: {self.reason.name}: {self.reason.found}"
        others = [each for each in self.tests if each.explains and each is not self.reason]
        if others:
            yield f"so does: {'; '.join(each.name for each in others)}"
        refused = [each.name for each in self.tests if each.explains is False]
        if refused:
            yield f"what does not: {'; '.join(refused)}"
        unknown = [f"{each.name} ({each.found})" for each in self.tests if each.explains is None]
        if unknown:
            yield f"not tested: {'; '.join(unknown)}"

    def figures(self) -> dict[str, object]:
        """Return all of it by name."""
        total = sum(response.size for response in self.responses)
        return {
            "symptoms": [each._asdict() for each in self.symptoms],
            "reason": None if self.reason is None else self.reason._asdict(),
            "tests": [each._asdict() for each in self.tests],
            "responses": [each.figures(total) for each in self.responses[:NUM_SHOWN]],
            "versions": self.versions,
            "untested": self.untested,
        }


def why(run: RunFiles, *, say: Say) -> WhyAnswer:
    """Find the first metric that left its band, and test what explains it if that is possible."""
    symptoms = departures(run.steps)
    if not symptoms:
        return WhyAnswer(symptoms=())
    with TemporaryDirectory(prefix="april_rl_why_") as folder:
        try:
            case = StepCase(run, symptoms, folder=Path(folder), say=say)
        except RunError as error:
            return WhyAnswer(symptoms=symptoms, untested=str(error))
        return WhyAnswer(
            symptoms=symptoms,
            tests=list(_tests(case)),
            responses=case.responses,
            model=case.config.model.path,
            versions=_versions(case),
        )


def _tests(case: StepCase) -> Iterator[Tested]:
    for explain in (*FACTS, remedies):
        try:
            yield from explain(case)
        except RunError as error:
            name = explain.__name__.replace("_", " ")
            yield Tested(name, name, None, str(error).partition("\n")[0])


def _versions(case: StepCase) -> str:
    """Return which share of the step's tokens each policy version sampled."""
    counts: Counter[int] = Counter()
    for scored in case.recorded.groups:
        for sample in scored.group.samples:
            for completion in sample.completions:
                counts[completion.policy_version] += len(completion.token_ids)
    total = max(1, counts.total())
    shares = (f"{counts[version] / total:.0%} by {version}" for version in sorted(counts)[::-1])
    return f"tokens sampled by policy version: {', '.join(shares)}"
