"""Every setting has a meaning, docs/settings.md shows it, and the site has every page."""

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from source_tree import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from settings_page import PAGE, own_settings, page, sections

COPIED = (
    "README.md",
    "README_zh.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs",
    "recipes",
)  # `make docs` writes the page


def test_the_settings_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tools/settings_page.py"


def test_every_setting_has_a_row_and_a_meaning() -> None:
    """Fails when a setting has no comment and its choices do not explain it."""
    first, _, rest = page().partition("\n## The run itself\n")
    keys = re.findall(r"^\| `(.+?)` \|", rest, flags=re.M)
    assert len(keys) == len(set(keys)) == sum(len(own_settings(of)) for _, of in sections())
    assert {"rollout.max_staleness", "reward.functions.NAME.weight", "seed"} <= set(keys)
    assert re.findall(r"^\| `(.+)` \| [^|]+ \|  \(", rest, flags=re.M) == []
    assert len(re.findall(r"^\| `", first, flags=re.M)) == 10


@pytest.mark.parametrize(
    "line",
    [
        "| `rollout.max_staleness` | `8` | most policy versions between a token's sampling and its "
        "training (int, >= 0) |\n",
        "| `data.path` | required | .jsonl, .json or .parquet file, Hugging Face data set id ",
        "builtin:arithmetic; leave unset with `sources`\n",  # from class and base class
        "| `rollout.on_stale` | `finish` | ",
        "`finish`: the step waits for it; `mask`: its tokens",
        "(list of choice) |\n",
        r"mean \|logprob - behaviour_logprob\| of age-0 tokens",
        "- **`rollout.resume`**: `auto`: keep if engines stay awake",
        "As in `evaluation`, unless given: `num_samples`, ",
    ],
)
def test_a_setting_is_shown_with_its_type_default_and_choices(line: str) -> None:
    assert line in page()


def pages_in(nav: Any) -> Iterator[str]:
    """Yield the pages of a table of contents."""
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from pages_in(entry)


def test_the_site_has_every_page_once() -> None:
    """Fails when a page is only added to docs/: it could not be found on the site."""
    text = (ROOT / "tools" / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")]
    pages += [ROOT / name for name in COPIED if name.endswith(".md")]
    assert sorted(pages_in(nav)) == sorted(path.relative_to(ROOT).as_posix() for path in pages)


def test_the_links_of_every_page_lead_to_files_of_the_site() -> None:
    """Anchors are checked by `make docs`."""
    wrong = []
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")]:
        text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", text)
        for link in (first or second for first, second in links):
            target = (path.parent / link).resolve()
            if ":" in link or target == ROOT / "LICENSE":
                continue
            inside = target.is_relative_to(ROOT) and target.relative_to(ROOT).parts[0] in COPIED
            if not (inside and target.exists()):
                wrong.append(f"{path.relative_to(ROOT)}: {link}")
    assert wrong == []
