"""The frame of a page: one HTML file with style, charts and Vega inside; nothing is fetched."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from april_rl.lab.report.vega import AGE_COLOURS, Chart

_LICENCE = "Vega, Vega-Lite and Vega-Embed: BSD-3-Clause, University of Washington"
_SNIPPET = "window.vegaEmbed = vegaEmbed;"

# The page may fetch nothing; Vega compiles its expressions, hence unsafe-eval.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1d2329; --soft: #57606a;
  --line: #d5dae0; --panel: #f5f7f9; --accent: #9a5b00; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --text: #e4e8ec; --soft: #a0aab4;
  --line: #39424c; --panel: #1e242b; --accent: #f0b35a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 68rem; background: var(--page);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .25rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; }
p { margin: .25rem 0 .75rem; } .soft { color: var(--soft); overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr));
  gap: .5rem; padding: 0; margin: 1rem 0; }
.figures div { background: var(--panel); border: 1px solid var(--line); border-radius: .4rem;
  padding: .5rem .75rem; }
.figures dt { color: var(--soft); font-size: .85rem; }
.figures dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.figures small { display: block; font-size: .8rem; color: var(--soft); }
.advice { border-left: .25rem solid var(--accent); background: var(--panel);
  padding: .5rem .75rem .5rem 1.75rem; margin: 1rem 0; }
.advice li { margin: .25rem 0; }
.small { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 1rem; }
.small h3 { margin: 0; } .small small { color: var(--soft); }
.chart { width: 100%; min-height: 4rem; } .chart summary { display: none; }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .4rem 0; }
summary { padding: .4rem .75rem; cursor: pointer; overflow-wrap: anywhere; }
dl { margin: 0; } details dl { padding: 0 .75rem .5rem; }
details dt { color: var(--soft); font-size: .85rem; } details dd { margin: 0 0 .5rem; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .85rem/1.5 ui-monospace, monospace; }
.cut { color: var(--accent); } .key span { padding: 0 .3rem; margin-right: .25rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
td small { display: block; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
footer { margin: 3rem 0 1rem; color: var(--soft); font-size: .8rem; }
"""

_DRAW = """
(function () {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  function config() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const text = colour("--text"), soft = colour("--soft"), line = colour("--line");
    return { background: "transparent", view: { stroke: line },
      axis: { labelColor: soft, titleColor: soft, gridColor: line, domainColor: line,
              tickColor: line, titleFontWeight: "normal" },
      legend: { labelColor: text, titleColor: text },
      boxplot: { rule: { color: soft }, median: { color: colour("--page") } },
      range: { category: ["#4c8dc9", "#e8833a", "#3aa37b", "#c9579c", "#b8902b", "#7f7fd5"] } };
  }
  function draw() {
    const narrow = innerWidth < 600;
    for (const data of document.querySelectorAll("script[data-chart]")) {
      const place = document.getElementById(data.dataset.chart);
      const spec = JSON.parse(data.textContent);
      if (narrow) narrowed(spec);
      const usermeta = spec.usermeta || {};
      vegaEmbed(place, spec, { mode: "vega-lite", actions: false, config: config(),
        renderer: usermeta.renderer || "svg", tooltip: { theme: dark.matches ? "dark" : "light" }
      }).catch((error) => { place.textContent = "This chart cannot be drawn: " + error; });
    }
  }
  function narrowed(spec) {
    for (const part of [spec, ...(spec.layer || [])]) {
      const colour = (part.encoding || {}).color;
      if (colour && colour.legend) colour.legend.columns = colour.legend.columns > 4 ? 3 : 1;
    }
  }
  if (window.vegaEmbed) { draw(); dark.addEventListener("change", draw); }
})();
"""

WITHOUT_CHARTS = (
    "The charts are left out: pip install vl-convert-python, and run the command again."
)


def page(title: str, body: Iterable[str], *, has_charts: bool = True) -> str:
    """Return the whole page; `title` is plain text, `body` is HTML."""
    bundle = vega_bundle() if has_charts else ""
    shades = "".join(
        f".age{age} {{ background: {colour}59; }}\n" for age, colour in enumerate(AGE_COLOURS)
    )
    note = f'<p class="soft">{WITHOUT_CHARTS}</p>' if bundle is None else ""
    # A tag inside one of the library's strings would end the element.
    vega = "" if bundle is None else bundle.replace("</script", "<\\/script")
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}{shades}</style>\n</head>\n<body>",
            note,
            *body,
            f"<footer>{escape(_LICENCE)}</footer>" if bundle else "",
            f"<script>{vega}</script>\n<script>{_DRAW}</script>\n</body>\n</html>\n",
        )
    )


def vega_bundle() -> str | None:
    """Return the JavaScript that draws charts, 0.9 MB; None when vl-convert-python is not
    installed.

    Making it takes two seconds, so it is kept in $APRIL_RL_CACHE, or ~/.cache/april_rl.
    """
    if find_spec("vl_convert") is None:
        return None
    cache = Path(os.environ.get("APRIL_RL_CACHE") or Path.home() / ".cache" / "april_rl")
    cached = cache / f"vega-{metadata.version('vl-convert-python')}.js"
    if cached.is_file():
        return cached.read_text(encoding="utf-8")
    import vl_convert

    bundle = str(vl_convert.javascript_bundle(_SNIPPET))
    _keep(cached, bundle)
    return bundle


def _keep(path: Path, text: str) -> None:
    """Write the file whole or not at all; without a writable cache the bundle is made each time."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)


def chart_block(chart: Chart) -> str:
    """Return a section with a chart, its heading and caption."""
    return (
        f'<section><h2>{escape(chart.title)}</h2><p class="soft">{escape(chart.caption)}</p>'
        f"{_element(chart)}</section>"
    )


def small_charts(title: str, caption: str, charts: Sequence[Chart]) -> str:
    """Return a section with charts side by side; empty without charts."""
    blocks = "".join(
        f"<div><h3>{escape(chart.title)}</h3><small>{escape(chart.caption)}</small>{_element(chart)}"
        "</div>"
        for chart in charts
    )
    head = f'<h2>{escape(title)}</h2><p class="soft">{escape(caption)}</p>'
    return f'<section>{head}<div class="small">{blocks}</div></section>' if blocks else ""


def _element(chart: Chart) -> str:
    return (
        f'<div class="chart" id="{chart.id}" role="img" aria-label="{escape(chart.title)}"></div>'
        f'<script type="application/json" data-chart="{chart.id}">{_json(chart.spec)}</script>'
    )


def _json(value: object) -> str:
    """Return JSON that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def figures(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return a row of figures, each (label, value, note)."""
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for label, value, note in entries
    )
    return f'<dl class="figures">{cells}</dl>'


def advice(sentences: Iterable[str]) -> str:
    """Return the sentences as a list; empty without sentences."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="advice">{items}</ul>' if items else ""


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table that scrolls where it is too wide; heads are text, cells are HTML."""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in rows)
    return f'<div class="scroll"><table>{f"<tr>{head}</tr>" * bool(head)}{body}</table></div>'


def text_entry(label: str, text: str, *, limit: int = 700) -> str:
    """Return a text below its label, as an entry of a <dl>; shortened to `limit` characters."""
    return f"<dt>{escape(label)}</dt><dd><pre>{escape(shorten(text, limit=limit))}</pre></dd>"


def shorten(text: str, *, limit: int = 700) -> str:
    """Return the text, without its middle if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"
