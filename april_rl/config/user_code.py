"""Load user functions that a setting names as `module:function`, and catch their errors."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import multiprocessing
import re
import resource
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType
from typing import Any, Self, TypeVar, cast

from april_rl.config.secrets import hint_at_forgotten
from april_rl.errors import RunError

GIB = 1 << 30
NO_ARGS: Mapping[str, object] = {}
T = TypeVar("T")


class OwnFunctionError(RunError):
    """A function of the user cannot be used, or failed, or returned an invalid value."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of the user that a setting names as `module:function`."""

    setting: str
    path: str

    def load(
        self,
        *given: str,
        args: Mapping[str, object] = NO_ARGS,
        key: str = "",
        is_shared: bool = False,
    ) -> Callable[..., Any]:
        """Import the function, which gets one argument for each of `given`, and bind `args`, the
        value of the setting `key`. Other functions share it if `is_shared`: then only the arguments
        after the `*` of this one are bound. Raise OwnFunctionError.
        """

        def load() -> Callable[..., Any]:
            found = import_function(self.path)
            names = keywords(found) & args.keys() if is_shared else args.keys()
            bound = {name: args[name] for name in names}
            check_call(found, *given, args=bound, key=key)
            return partial(found, **bound)

        return self.call(load, "cannot be used")

    def call(self, function: Callable[[], T], when: str = "") -> T:
        """Call code of the user; raise OwnFunctionError with what it raised, and `when`."""
        with Caught() as caught:
            return function()
        raise OwnFunctionError(f"{self}{' ' * bool(when)}{when}: {caught.message}")

    def __str__(self) -> str:
        return f"{self.setting}={self.path}"


def import_function(function: str) -> Callable[..., Any]:
    """Import the function of `module:function`; raise TypeError, or as `import_object` does."""
    found = import_object(function)
    if not callable(found):
        module, _, name = function.partition(":")
        raise _not_function(module, name, type(found).__name__)
    return cast(Callable[..., Any], found)


def import_object(path: str) -> object:
    """Import `module:name`; raise ModuleNotFoundError, TypeError, or what the import raises."""
    module, _, name = path.partition(":")
    try:
        names = vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module imports something that is missing
        raise _no_module(error.name) from None
    if name not in names:
        made = [each for each in names.values() if isinstance(each, type | FunctionType)]
        own = [each.__name__ for each in made if each.__module__ == module]
        raise _no_function(module, name, own)
    return cast(object, names[name])


def check_named(path: str) -> None:
    """Raise the errors of `import_function` without importing the module, whose imports may take
    long. This finds a module that does not exist or is not Python, and a name that its source does
    not define, or defines as a number or a text.
    """
    module, _, name = path.partition(":")
    text, body = _source_of(module)
    if not text:
        return
    assigned = [
        node.value for node in body if isinstance(node, ast.Assign) and name in _names_defined(node)
    ]
    is_made = re.search(rf"\b(def|class|import|as)\s+{re.escape(name)}\b", text)
    if assigned and isinstance(value := assigned[-1], ast.Constant) and not is_made:
        raise _not_function(module, name, type(value.value).__name__)
    # Ways to define names that the parser cannot see.
    made = r"import \*|__getattr__|globals\(|setattr\(|vars\("
    if re.search(rf"\b{re.escape(name)}\b|{made}", text):
        return
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    raise _no_function(module, name, [each.name for each in body if isinstance(each, kinds)])


def signature_of(path: str) -> Callable[..., Any] | None:
    """Return a function with the signature of `module:function` that does nothing, read from the
    source without importing it; None for what is not a plain function there.
    """
    module, _, name = path.partition(":")
    found = [node for node in _source_of(module)[1] if name in _names_defined(node)]
    made = found[-1] if found else None
    if not isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef) or made.decorator_list:
        return None
    for argument in ast.walk(made.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    made.args.defaults = [ast.Constant(None) for _ in made.args.defaults]
    made.args.kw_defaults = [each and ast.Constant(None) for each in made.args.kw_defaults]
    names: dict[str, Any] = {}
    exec(f"def {name}({ast.unparse(made.args)}): ...", names)
    return cast(Callable[..., Any], names[name])


def _names_defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    return [*map(ast.unparse, node.targets)] if isinstance(node, ast.Assign) else []


def _source_of(module: str) -> tuple[str, list[ast.stmt]]:
    """Return the text of a module and its statements, none if it is imported already or is not
    Python; raise ModuleNotFoundError or SyntaxError.
    """
    if module in sys.modules:
        return "", []
    spec = _spec_of(module)
    if not (spec.has_location and str(spec.origin).endswith(".py")):
        return "", []
    source = Path(str(spec.origin)).read_bytes()
    return source.decode(errors="replace"), ast.parse(source, str(spec.origin)).body


def _spec_of(module: str) -> ModuleSpec:
    """Return where a module is, without importing its packages; raise ModuleNotFoundError."""
    first, *parts = module.split(".")
    found, name = importlib.util.find_spec(first), first
    for part in parts:
        if found is None or found.submodule_search_locations is None:
            break
        name = f"{name}.{part}"
        found = PathFinder.find_spec(name, list(found.submodule_search_locations))
    if found is None or name != module:
        raise _no_module(name if found is None else module)
    return found


def _no_module(name: str) -> ModuleNotFoundError:
    near = get_close_matches(name, [path.stem for path in Path().glob("*.py")], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ModuleNotFoundError(
        f"there is no module {name} in the folder of the command, on PYTHONPATH or among the "
        f"installed packages{hint}"
    )


def _not_function(module: str, name: str, kind: str) -> TypeError:
    return TypeError(f"{name} of module {module} is not a function: it is of type {kind}")


def _no_function(module: str, name: str, own: Iterable[str]) -> TypeError:
    known = [each for each in own if not each.startswith("_")]
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(known[:8])}"
    return TypeError(f"module {module} has no function {name!r}{hint if known else ''}")


def check_args(
    function: Callable[..., object], args: Mapping[str, object], *, given: Collection[str] = ()
) -> None:
    """Raise TypeError unless a function accepts `args` by name, in addition to `given`."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    by_name = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
    named = [p.name for p in by_name if name_of(p) not in given]
    unknown = [name for name in args if name not in named]
    if unknown:
        raise TypeError(f"has no argument {unknown[0]!r}; it takes {', '.join(named) or 'none'}")


def check_call(
    function: Callable[..., object], *given: str, args: Mapping[str, object], key: str
) -> None:
    """Raise TypeError unless f(*given, **args) can be called; the setting `key` holds `args`."""
    try:
        inspect.signature(function).bind(*given, **args)
    except TypeError as error:
        more = f", NAME=…), where {key} gives each NAME" if key else ")"
        raise TypeError(f"{error}; it is called as f({', '.join(given)}{more}") from None


def keywords(function: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments that `algorithm.args` may set: those after the `*`."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}


def further_names(
    function: Callable[..., object],
    args: Mapping[str, object],
    *,
    given: Collection[str] = (),
    also: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the other arguments that a function takes: ones without a default, and `also`."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    rest = [p for p in named if p.name not in args and name_of(p) not in given]
    return tuple(p.name for p in rest if p.default is p.empty or p.name in also)


def name_of(parameter: inspect.Parameter) -> str:
    return parameter.name.lstrip("_")


class Caught:
    """Context manager that catches any error of user code and describes it in `message`.

    In the controller a KeyboardInterrupt is not an error of that code: somebody wants to stop.
    """

    def __init__(self) -> None:
        self.message = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, KeyboardInterrupt) and multiprocessing.parent_process() is None:
            return False
        if error is not None:
            last_line, place = traceback.format_exception_only(error)[-1].strip(), _place(error)
            is_sentence = isinstance(
                error, RunError | TypeError | ModuleNotFoundError | RuntimeError
            )
            if not place and is_sentence:
                last_line = str(error)  # raised by this package
            hint = hint_at_forgotten(last_line)
            message = f"{last_line}{place}{_limit(error)}{hint}"
            # It may repeat half of a surrogate pair, which cannot be written.
            self.message = message.encode(errors="backslashreplace").decode()
        return True


def memory_gib() -> float:
    """Return this process's limit of memory in GiB; negative when there is no limit."""
    return resource.getrlimit(resource.RLIMIT_DATA)[0] / GIB


def _limit(error: BaseException) -> str:
    if not isinstance(error, MemoryError) or memory_gib() < 0:
        return ""
    return f"; the user_code.memory_gib of its process is {memory_gib():g}"


def _place(error: BaseException) -> str:
    """Return ` (file:line)` of the user code that raised; empty for code of this package."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    machinery = ("<frozen", importlib.__file__, inspect.__file__, ast.__file__)
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(machinery)
    ]
    if Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1]):
        return ""
    return f" ({frames[-1].filename}:{frames[-1].lineno})"
