"""docs/design.md and README.md agree with the code: floors, lifecycles, glossary, paths, names."""

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple, get_type_hints

import pytest
from source_tree import DOORS, PACKAGE, ROOT, package_files, tree_of
from test_architecture import FLOORS, HOUSE

from april_rl.config import TrainConfig
from april_rl.training.rollout.open_group import _MOVES
from april_rl.training.rollout.record import GroupState

DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

_IS_PATH = re.compile(r"[\w./-]*(?:\.(?:py|md|yaml|cfg|txt|png|sh)|/)")
# Files that a run writes and the pages name; the checkout does not contain them.
WRITTEN_BY_A_RUN = {
    "config.yaml",
    "stall_report.txt",
    "environments/",
    "samples/",
    "timeline/",
    "recorded/",
    "report.html",
    "checkpoints/",
    "wandb/",
    "tensorboard/",
    "adapter/",
    "outputs/",
    "exports/",
    "inputs/",
    "logs/",
    "outputs/gpu_acceptance/acceptance.md",
}
# First folders of the paths that a page may name.
BASES = {
    "docs/contributing.md": PACKAGE / "training" / "engine",
    "docs/gpu.md": ROOT / "tools" / "cluster",
    "docs/trouble.md": ROOT / "tests" / "run" / "supervision",
    "recipes/README.md": ROOT / "recipes",
}
# Identifiers that contain a word which the glossary forbids, with the reason: word and file.
ALLOWED_WORDS = {
    ("query", "training/learner/model/attention.py"): "queries, keys and values of attention",
}


class Row(NamedTuple):
    """A row of a table in a section of the page."""

    cells: list[str]

    def names(self, column: int) -> list[str]:
        """Return the words in backticks of a cell."""
        return re.findall(r"`([^`]+)`", self.cells[column])


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[Row]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert set(lines[1]) <= set("|-:"), lines[:2]
    return [Row([cell.strip() for cell in line.strip("|").split("|")]) for line in lines[2:]]


def named(text: str) -> list[str]:
    """Return what is in backticks outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def assigned(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement or an argument defines."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each.name
        elif isinstance(each, ast.arg):
            yield each.arg
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            yield each.attr


@cache
def identifiers() -> dict[str, set[str]]:
    """Return every name that the package defines, with the files that define it."""
    found: dict[str, set[str]] = {}
    for path in package_files():
        for name in assigned(tree_of(path)):
            found.setdefault(name, set()).add(path.relative_to(PACKAGE).as_posix())
    return found


@cache
def members() -> set[str]:
    """Return every `Class.member` of the package."""
    return {
        f"{node.name}.{name}"
        for path in package_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        for name in assigned(node)
    }


@cache
def settings() -> set[str]:
    """Return every key of the configuration, dotted, sections included."""
    found: set[str] = set()

    def walk(kind: type, prefix: str) -> None:
        for name, hint in get_type_hints(kind).items():
            found.add(f"{prefix}{name}")
            if dataclasses.is_dataclass(hint):
                walk(hint, f"{prefix}{name}.")

    walk(TrainConfig, "")
    return found


def exists(path: str) -> bool:
    return path in WRITTEN_BY_A_RUN or (ROOT / path).exists() or (PACKAGE / path).exists()


def with_whole_paths(page: str) -> str:
    """Return a page in which paths that are behind the door of their row begin with it."""

    def whole(row: re.Match[str]) -> str:
        def with_door(path: re.Match[str]) -> str:
            return path[0] if exists(path[1]) else f"`{row[1]}/{path[1]}`"

        return re.sub(r"`([\w/]+(?:\.py|/))`", with_door, row[0])

    return re.sub(r"^\| [^|]+ \| `(\w+)/` \|.*", whole, page, flags=re.MULTILINE)


def is_known(token: str) -> bool:
    """Return whether a token in backticks is a path, a setting (perhaps with a value) or a name."""
    if _IS_PATH.fullmatch(token):
        return exists(token)
    if token in identifiers() or token in members() or token.partition("=")[0] in settings():
        return True
    return token in SPOKEN


# Tokens of docs/design.md that are neither identifiers nor files: commands, files of a run, forms
# of values.
SPOKEN = {
    "__main__",
    "python -m april_rl COMMAND",
    "samples/leftover.jsonl",
    "length",
    *FLOORS,
}


def test_the_doors_and_floors_agree_with_the_architecture_test() -> None:
    table = rows(section(DESIGN, "Four doors"))
    assert {row.names(0)[0].strip("/") for row in table} == set(DOORS)
    for row in table:
        floors = [set(re.findall(r"`(\w+)`", floor)) for floor in row.cells[2].split(";")]
        assert floors == list(HOUSE[row.names(0)[0].strip("/")])


def test_the_moves_of_a_sample_are_those_that_the_code_allows() -> None:
    allowed = {(now.value, then.value) for now, targets in _MOVES.items() for then in targets}
    table = rows(section(DESIGN, "Lifecycle of a sample"))
    drawn = {(*row.names(0), then) for row in table for then in row.names(2)}
    assert drawn == allowed | {("waiting",), ("acting",)}


@pytest.mark.parametrize("title", ["Lifecycle of a sample", "Lifecycle of a group"])
def test_a_lifecycle_names_what_moves_and_which_function_moves_it(title: str) -> None:
    table = rows(section(DESIGN, title))
    assert {name for row in table for name in row.names(3)} <= members()
    assert all(row.cells[1] and row.names(3) for row in table)


def test_every_state_of_a_group_can_be_reached() -> None:
    reached = {
        name for row in rows(section(DESIGN, "Lifecycle of a group")) for name in row.names(2)
    }
    assert reached == {state.value for state in GroupState}


def test_files_and_names_in_the_design_exist() -> None:
    assert [token for token in named(with_whole_paths(DESIGN)) if not is_known(token)] == []
    # This includes the drawing.
    spoken = re.findall(r"(?<![\w/.])[A-Z]\w+\.[a-z_]\w*(?!\w)", DESIGN)
    assert len(spoken) > 40
    assert [name for name in spoken if name not in members()] == []


def test_the_paths_in_drawings_and_proposals_exist() -> None:
    paths = re.findall(r"(?<![\w/.])[\w/]+\.py\b", with_whole_paths(DESIGN))
    assert len(paths) > 40
    assert [path for path in paths if not exists(path)] == []


def uses_of(words: Iterable[str]) -> set[tuple[str, str]]:
    """Return which of the words are parts of a name, and in which file."""
    return {
        (word, file)
        for name, files in identifiers().items()
        for word in words
        if re.search(rf"_{word}s?_", f"_{snake_case(name)}_")
        for file in files
    }


def test_glossary_words_are_in_the_code_and_forbidden_words_are_not() -> None:
    """Fails when a name disappears from the code, or when a second word for the same
    thing appears.
    """
    table = rows(section(DESIGN, "Glossary"))
    assert len(table) > 25
    assert [row.cells[0] for row in table if not row.names(1)] == []
    forbidden = {word for row in table for word in row.cells[3].split(", ") if word}
    assert {word for word, _ in ALLOWED_WORDS} <= forbidden
    assert sorted(uses_of(forbidden) - ALLOWED_WORDS.keys()) == []


def test_every_exception_to_the_glossary_is_still_needed() -> None:
    assert ALLOWED_WORDS.keys() <= uses_of({word for word, _ in ALLOWED_WORDS})


def snake_case(name: str) -> str:
    return "_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)).lower()


PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*.md"))
)


@pytest.mark.parametrize("page", PAGES)
def test_the_paths_and_links_of_a_page_exist(page: str) -> None:
    text = with_whole_paths((ROOT / page).read_text(encoding="utf-8"))
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#\s]+)\)", text)
    assert [link for link in links if not (folder / link).is_file()] == []
    paths = [token for token in named(text) if _IS_PATH.fullmatch(token)]
    base = BASES.get(page, ROOT)
    assert [path for path in paths if not exists(path) and not (base / path).exists()] == []
    written = re.findall(r"docs/[\w/]+\.(?:md|png)", text)
    assert [path for path in written if not exists(path)] == []


def test_no_page_has_a_placeholder() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")]
    assert ROOT / "docs" / "gpu.md" in pages
    found = {
        page.relative_to(ROOT).as_posix(): placeholders
        for page in pages
        if (placeholders := re.findall(r"@@\w+@@|\b(?:TODO|TBD|FIXME)\b", page.read_text("utf-8")))
    }
    assert found == {}


def test_every_page_is_linked_from_the_readme() -> None:
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(re.findall(r"\]\(([^)]+)\)", README))
