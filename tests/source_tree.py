"""The source of the package as syntax trees: files, imports, definitions, sizes."""

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "april_rl"
TESTS = ROOT / "tests"
DOORS = ("training", "task", "run", "start")

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)


class Import(NamedTuple):
    """A module that a file imports, with its full name, and where."""

    module: str
    line: int


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def all_files() -> list[Path]:
    return (
        package_files()
        + sorted((ROOT / "tools").rglob("*.py"))
        + sorted((ROOT / "tests").rglob("*.py"))
    )


def where(path: Path, line: int, what: str = "") -> str:
    return f"{path.relative_to(ROOT)}:{line} {what}".rstrip()


def part_of(path: Path) -> str:
    """Return the folder or top-level module that a file of the package belongs to; within the lab,
    return its folder there.
    """
    return _part(path.relative_to(PACKAGE).with_suffix("").parts)


def _part(names: Sequence[str]) -> str:
    if names[0] in DOORS and len(names) > 1 and names[1] != "__init__":
        return names[1]
    in_lab = names[0] == "lab" and len(names) > 1 and names[1] != "__init__"
    return ".".join(names[:2]) if in_lab else names[0]


@cache
def imports_of(path: Path) -> list[Import]:
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += [Import(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def files_loaded_by(path: Path) -> set[Path]:
    """Return the files of the package that importing `path` loads, including itself."""
    found, waiting = {path}, [path]
    while waiting:
        for module in top_level_imports(waiting.pop()):
            names = module.split(".")
            if names[0] != "april_rl":
                continue
            for length in (len(names), len(names) - 1):  # the name is a module, or something in one
                part = ROOT.joinpath(*names[:length])
                for file in (part.with_suffix(".py"), part / "__init__.py"):
                    if file.is_file() and file not in found:
                        found.add(file)
                        waiting.append(file)
    return found


def top_level_imports(path: Path) -> list[str]:
    """Return the modules that a file imports when it is loaded, not within functions or for type
    checkers.
    """
    found = []
    for node in tree_of(path).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def imported_parts(path: Path) -> dict[str, int]:
    """Return the parts of the package that a file imports, with a line number each."""
    modules = [(entry.module.split("."), entry.line) for entry in imports_of(path)]
    ours = [(names[1:], line) for names, line in modules if names[0] == "april_rl"]
    return {_part(names): line for names, line in ours if names}


def definitions(
    node: ast.AST, *, prefix: str = ""
) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Yield every function, method and class with its dotted name, nested functions included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            yield f"{prefix}{child.name}", child
            yield from definitions(child, prefix=f"{prefix}{child.name}.")
        else:
            yield from definitions(child, prefix=prefix)


def functions(paths: list[Path]) -> Iterator[tuple[Path, str, Function]]:
    for path in paths:
        for name, node in definitions(tree_of(path)):
            if isinstance(node, Function):
                yield path, name, node


def needs_a_docstring(node: Function | ast.ClassDef) -> bool:
    """Return False for properties and functions of one simple statement, which their names
    describe completely.
    """
    if isinstance(node, ast.ClassDef):
        return True
    statements = node.body[ast.get_docstring(node) is not None :]
    is_simple = len(statements) <= 1 and not any(isinstance(each, BLOCKS) for each in statements)
    return not is_simple and not any("property" in ast.unparse(d) for d in node.decorator_list)


def length(node: Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def nesting(node: ast.AST) -> int:
    """Return how deep blocks are nested; `elif` and inner functions do not count."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        deepest = max(deepest, nesting(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def positional(node: Function) -> list[str]:
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return [name for name in names if name not in ("self", "cls")]


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def is_nested(path: Path, name: str) -> bool:
    owner = name.rpartition(".")[0]
    return any(isinstance(node, Function) and n == owner for n, node in definitions(tree_of(path)))


def names_in(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
