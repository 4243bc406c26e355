"""The answer of `why` as a page: bands, tested explanations, and the responses of the step."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from april_rl.lab.replay.page import SORT, responses_section
from april_rl.lab.report import html
from april_rl.lab.report.run_files import RunFiles
from april_rl.lab.report.vega import Lines
from april_rl.lab.why.why import NUM_SHOWN, WhyAnswer
from april_rl.task.data.tokenizer import load_tokenizer

_NUM_CHARTS = 6
_MARKS = {True: "explains it", False: "no", None: "not tested"}


def why_page(run: RunFiles, answer: WhyAnswer) -> str:
    return html.page(f"{run.name}: why", _body(run, answer))


def _body(run: RunFiles, answer: WhyAnswer) -> Iterator[str]:
    yield f"<header><h1>{escape(run.name)}: what happened, and why</h1>"
    yield html.advice(answer.lines()) + "</header><main>"
    charts = [
        Lines(
            id=f"band{number}",
            title=departure.key,
            caption=f"Step {departure.step}: {departure}",
            keys={departure.key: departure.key},
        ).chart(run.steps, height=120)
        for number, departure in enumerate(answer.symptoms[:_NUM_CHARTS])
    ]
    yield html.small_charts("What left its band", "", list(filter(None, charts)))
    if answer.tests:
        found = '<div style="text-align: left">{}</div>'
        rows = (
            [escape(each.name), _MARKS[each.explains], found.format(escape(each.found))]
            for each in answer.tests
        )
        yield f"<h2>Explanations, tested</h2>{html.table((), rows)}"
        yield f'<p class="soft">{escape(answer.versions)}</p>'
        decode = load_tokenizer(answer.model).decoder()
        title = f"The {NUM_SHOWN} responses that pull most at the update"
        yield responses_section(title, answer.responses, decode=decode, shown=NUM_SHOWN)
    yield f"</main>{SORT}"
