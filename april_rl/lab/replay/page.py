"""A replayed step as a page: its metrics, and its responses shaded by what each token did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from april_rl.lab.replay.replay import Replay, replay_table
from april_rl.lab.replay.responses import TrainedResponse
from april_rl.lab.report import html

Decode = Callable[[Sequence[int]], str]

_MAX_TOKENS = 1500  # shown of a response
_FIGURES = ("share", "reward", "advantages", "ages", "ratios", "clipped", "masks", "num_tokens")
_STYLE = """<style>
.up { background: rgb(58 163 123 / calc(var(--pull) * 85%)); }
.down { background: rgb(232 131 58 / calc(var(--pull) * 85%)); }
</style>"""
SORT = """<script>
for (const button of document.querySelectorAll("button[data-by]")) {
  button.addEventListener("click", () => {
    const place = button.closest("section").querySelector("div"), by = button.dataset.by;
    const sign = button.dataset.sign = -(Number(button.dataset.sign) || 1);
    const value = (each) => Number(each.dataset[by]);
    place.append(...[...place.children].sort((a, b) => sign * (value(a) - value(b))));
  });
}
</script>"""


def replay_page(found: Replay, *, settings: Sequence[str], decode: Decode) -> str:
    """Return the page of a replayed step; `settings` are those that were changed."""
    title = f"Step {found.step}, trained again"
    table = f'<pre class="scroll" style="white-space: pre">{escape(replay_table(found, settings))}'
    body = [f"<h1>{title}</h1>{table}</pre>"]
    body.append(responses_section("Responses", found.again.responses, decode=decode))
    if found.changed is not None:
        head = f"Responses with {' '.join(settings)}"
        body.append(responses_section(head, found.changed.responses, decode=decode))
    return html.page(title, [*body, SORT], has_charts=False)


def responses_section(
    title: str, responses: Sequence[TrainedResponse], *, decode: Decode, shown: int | None = None
) -> str:
    """Return a section with the first `shown` responses of an update (None: all), which buttons
    sort; each token is shaded by how the update pulls at it.
    """
    total = sum(response.size for response in responses)
    most = max((abs(each.tokens["pushes"]).max(initial=0.0) for each in responses), default=0.0)
    buttons = (f'<button data-by="{each}">{each}</button>' for each in _FIGURES)
    blocks = (_block(each, total, float(most), decode) for each in responses[:shown])
    return (
        f'{_STYLE}<section><h2>{escape(title)}</h2><p class="soft">Those that pull most at the '
        "update first: the share is their part of all gradients by log-probabilities, the other "
        f"figures are means over their tokens. Sort by {' '.join(buttons)}</p>"
        '<p class="key"><span class="up" style="--pull:.7">made more likely</span> '
        '<span class="down" style="--pull:.7">made less likely</span></p>'
        f"<div>{''.join(blocks)}</div></section>"
    )


def _block(response: TrainedResponse, total: float, most: float, decode: Decode) -> str:
    sample, figures = response.sample, response.figures(total)
    values = {key: f"{figures[key]:.4g}" for key in _FIGURES}
    data = " ".join(f'data-{key}="{value}"' for key, value in values.items())
    head = ", ".join(f"{key} {value}" for key, value in values.items())
    shown = zip(sample.token_ids[:_MAX_TOKENS], _pulls(response, most), strict=False)
    tokens = "".join(f"{start}{escape(decode([token]))}</span>" for token, start in shown)
    left_out = max(0, sample.num_tokens - _MAX_TOKENS)
    rest = f" [… {left_out:,} tokens …]" if left_out else ""
    return (
        f"<details {data}><summary>prompt {sample.prompt.id}.{sample.index}: {head}</summary>"
        f"<dl>{html.text_entry('prompt', sample.prompt.text)}"
        f"<dt>response</dt><dd><pre>{tokens}{rest}</pre></dd></dl></details>"
    )


def _pulls(response: TrainedResponse, most: float) -> Iterator[str]:
    """Yield the start of the element of each token."""
    columns = (response.tokens[name] for name in ("pushes", "ages", "ratios", "weights"))
    for push, age, ratio, weight in zip(*columns, strict=True):
        side = "up" if push >= 0 else "down"
        tip = f"push {push:+.2e}, age {age:.0f}, ratio {ratio:.3f}, weight {weight:.3f}"
        pull = abs(push) / max(most, 1e-30)
        yield f'<span class="{side}" style="--pull:{pull:.2f}" title="{tip}">'
