"""The rules of the architecture: floors, owners of libraries, sizes, docstrings, annotations."""

import ast
import configparser
import re
import statistics
import subprocess
import sys
from itertools import chain

import pytest
from source_tree import (
    DOORS,
    PACKAGE,
    ROOT,
    all_files,
    definitions,
    files_loaded_by,
    functions,
    imported_parts,
    imports_of,
    is_nested,
    is_public,
    length,
    names_in,
    needs_a_docstring,
    nesting,
    package_files,
    part_of,
    positional,
    top_level_imports,
    tree_of,
    where,
)

from april_rl import api

# The doors of the package from the lowest, each with its floors from the lowest. A room of the lab
# has its door in its name.
HOUSE: dict[str, tuple[set[str], ...]] = {
    "april_rl": (
        # These import nothing of the rest; of a door itself there is only a docstring.
        {"errors", "__version__", "answers", "jail", *DOORS},
        {"types", "metrics", "config"},
    ),
    "run": ({"checkpointing"}, {"tracking", "supervision"}),
    "training": (
        {"algorithm", "batch", "rollout"},
        {"engine", "learner"},
        {"runtime"},
        {"batches", "updates", "recorded_steps"},
        {"parts"},
        {"trainer"},
    ),
    "task": (
        {"processes", "teacher_server"},
        {"data", "rewards", "evaluation", "tiny"},
        {"environments"},
    ),
    "start": ({"planning"}, {"assembly"}, {"commands"}, {"command_line"}, {"python"}),
    "trl": ({"trl"},),
    "lab": (
        {"lab.simulator", "lab.dashboards"},
        {"lab.report"},
        {"lab.attack", "lab.price"},
        {"lab.rehearsal", "lab.certify", "lab.replay"},
        {"lab.why"},
        {"lab.commands", "lab"},
    ),
    "python -m": ({"api", "train"}, {"__main__"}),
}
FLOORS = {part: floor for floor, parts in enumerate(chain(*HOUSE.values())) for part in parts}
# Rooms whose tests take seconds and need neither GPU nor processes.
PURE = {"types", "metrics", "config", "checkpointing", "algorithm", "batch", "rollout"}
PURE |= {"lab.simulator", "lab.report"}
HYDRA_USERS = {"config", "command_line", "commands", "lab.commands"}
OWNERS = {
    "vllm": {"engine", "trl"},
    "trl": {"trl"},
    "wandb": {"tracking", "lab.dashboards"},
    "wandb_workspaces": {"lab.dashboards"},
    "trackio": {"tracking"},
    "tensorboard": {"tracking"},
    "vl_convert": {"lab.report"},
    "datasets": {"data"},
    "huggingface_hub": {"planning", "assembly", "learner", "lab.commands"},
    "ray": {"runtime", "supervision"},
    "peft": {"learner"},
    "hydra": HYDRA_USERS,
    "omegaconf": HYDRA_USERS,
}
HEAVY = ["torch", "vllm", "transformers", "ray", "datasets", "wandb", "trackio"]
SAYS_NOTHING = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "misc"}
SAYS_NOTHING_IN_A_NAME = {"utils", "helper", "helpers", "manager", "do", "handle"}
# Verbs whose participle equals the infinitive (read, set, run) are missing; so are seed and need.
PARTICIPLE = re.compile(
    r"\w+(?<!e)ed|built|chosen|done|drawn|found|given|gone|held|hidden|kept|known|left|lost|made"
    r"|meant|met|paid|said|seen|sent|shown|spent|taken|thrown|told|worn|written"
)
PREPOSITIONS = {"among", "as", "at", "by", "for", "from", "here", "in", "of", "on", "to", "with"}
DICTATED = {"forward", "packed_attention"}  # torch and transformers define these signatures
MAX_FUNCTION_LINES, MAX_POSITIONAL, MAX_NESTING = 60, 3, 3
PATH = ("rollout", "batch", "algorithm", "learner", "engine", "runtime")
PATH_FILES = (
    *("training/trainer.py", "training/updates.py", "types.py", "metrics.py"),
    # Every update runs these three of the model's room.
    *(
        "training/learner/model/attention.py",
        "training/learner/model/logprobs.py",
        "training/learner/model/fused.py",
    ),
)
TOLERANCE_K = 0.2
MAX_MEDIAN, MAX_P90 = 10, 35


def test_every_part_of_the_package_has_a_floor() -> None:
    parts = {part_of(path) for path in package_files()} - {"__init__"}
    assert parts <= FLOORS.keys()


def test_a_module_imports_only_its_own_folder_and_lower_floors() -> None:
    wrong = []
    for path in package_files():
        # Users import it by this name.
        part = part_of(path) if path != PACKAGE / "__init__.py" else "__main__"
        for imported, line in imported_parts(path).items():
            if imported != part and FLOORS[imported] >= FLOORS.get(part, 0):
                wrong.append(where(path, line, f"{part} imports {imported}"))
    assert wrong == []


def test_no_test_of_the_core_needs_the_lab() -> None:
    """Exceptions are tests of tools that measure for the lab."""
    users = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if not path.is_relative_to(ROOT / "tests" / "lab")
        for entry in imports_of(path)
        if entry.module.startswith("april_rl.lab")
    }
    tools = ("bench", "gpu_acceptance", "speedrun")
    assert users == {f"tests/tools/test_{tool}.py" for tool in tools}


def test_the_package_imports_itself_by_its_full_name() -> None:
    relative = [
        where(path, node.lineno)
        for path in package_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_type_checkers_see_the_names_of_the_api() -> None:
    checked = next(node for node in tree_of(PACKAGE / "api.py").body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.name)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {f"april_rl.{module}": names for module, names in api._MODULES.items()}
    assert seen == {(module, name) for module, names in modules.items() for name in names}


@pytest.mark.parametrize("first", ["import april_rl.train", "import april_rl.api", ""])
def test_train_is_a_module_of_the_package_and_a_function_of_its_api(first: str) -> None:
    script = f"""{first}
from april_rl import train as module
from april_rl.api import train as function
print(type(module).__name__, type(function).__name__)"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (ran.returncode, ran.stdout) == (0, "module function\n"), ran.stderr


def test_the_tiny_task_is_imported_only_by_the_command_lines() -> None:
    users = {part_of(path) for path in package_files() if "tiny" in imported_parts(path)}
    assert users <= {"tiny", "planning"}


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_is_imported_only_by_its_owner(library: str) -> None:
    wrong = [
        where(path, entry.line)
        for path in package_files()
        for entry in imports_of(path)
        if entry.module.split(".")[0] == library and part_of(path) not in OWNERS[library]
    ]
    assert wrong == []


def test_only_the_runtime_knows_both_learner_and_engine() -> None:
    known: dict[str, set[str]] = {}
    for path in package_files():
        known.setdefault(part_of(path), set()).update(imported_parts(path))
    both = {part for part, parts in known.items() if {"learner", "engine"} <= parts}
    assert both <= {"runtime", "lab.certify"}


def test_the_pure_floors_import_nothing_heavy() -> None:
    wrong = [
        where(path, entry.line, entry.module)
        for path in package_files()
        if part_of(path) in PURE - {"algorithm"}  # losses work on tensors
        for entry in imports_of(path)
        if entry.module.split(".")[0] in HEAVY
    ]
    assert wrong == []


@pytest.mark.parametrize("module", ["april_rl.config", "april_rl.train", "april_rl.__main__"])
def test_importing_the_command_line_loads_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*sorted({set(HEAVY)!r} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "\n", "")


def test_nothing_that_the_controller_loads_computes_with_torch() -> None:
    """transformers itself loads torch, for tokenizers and model configurations. Fails when the
    memory plan, a check or the trainer needs a module of the learner that computes.
    """
    starts = PACKAGE / "start" / "assembly" / "run.py", PACKAGE / "training" / "trainer.py"
    loaded = set().union(*map(files_loaded_by, starts))
    assert PACKAGE / "start" / "planning" / "memory_plan.py" in loaded
    wrong = [
        where(path, 1, module)
        for path in loaded
        for module in top_level_imports(path)
        if module.split(".")[0] == "torch"
    ]
    assert wrong == []


def test_no_function_is_longer_than_60_lines_and_most_are_short() -> None:
    lengths = {
        where(p, node.lineno, name): length(node) for p, name, node in functions(package_files())
    }
    assert {place: n for place, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}
    assert statistics.median(lengths.values()) <= MAX_MEDIAN
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= MAX_P90


def test_blocks_nest_three_deep_at_most() -> None:
    found = functions(package_files() + sorted((ROOT / "tools").rglob("*.py")))
    assert [
        where(p, node.lineno, name) for p, name, node in found if nesting(node) > MAX_NESTING
    ] == []


def test_functions_take_three_positional_arguments_at_most() -> None:
    wrong = [
        where(path, node.lineno, f"{name}({', '.join(positional(node))})")
        for path, name, node in functions(package_files())
        if is_public(name) and node.name not in DICTATED
        if len(positional(node)) > MAX_POSITIONAL
    ]
    assert wrong == []


def test_every_module_has_a_docstring() -> None:
    assert [where(path, 1) for path in all_files() if not ast.get_docstring(tree_of(path))] == []


def test_everything_public_is_documented() -> None:
    """Properties and functions of one simple statement may lack a docstring."""
    wrong = [
        where(path, node.lineno, name)
        for path in package_files()
        for name, node in definitions(tree_of(path))
        if is_public(name) and needs_a_docstring(node)
        if not ast.get_docstring(node) and not is_nested(path, name)
    ]
    assert wrong == []


def test_everything_is_annotated() -> None:
    wrong = []
    for path, name, node in functions(package_files()):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [extra for extra in (node.args.vararg, node.args.kwarg) if extra is not None]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        if bare or node.returns is None:
            wrong.append(where(path, node.lineno, f"{name}({', '.join(bare)})"))
    assert wrong == []


def test_no_broad_exception_is_swallowed() -> None:
    """Exceptions are places where a library raises anything (trackers, which must not end a run,
    Ray's start, sympy), where a run of a sweep fails, where a checkpoint file is not written for
    any reason, where user code may have written into a pipe, and the jail of a program.
    """
    wrong = [
        where(path, node.lineno)
        for path in package_files()
        for node in ast.walk(tree_of(path))
        if _catches_everything(node)
    ]
    found = {line.partition(":")[0] for line in wrong}
    allowed = {"training/runtime/cluster.py", "run/tracking/backends.py", "start/command_line.py"}
    allowed |= {"run/checkpointing/checkpointer.py", "task/environments/adapters.py"}
    allowed |= {"answers/expressions.py"}
    allowed |= {
        "task/environments/door.py",
        "task/environments/pool.py",
        "task/environments/child.py",
    }
    allowed |= {"jail/jail.py"}
    assert found == {f"april_rl/{name}" for name in allowed}, wrong


def _catches_everything(node: ast.AST) -> bool:
    everything = {"Exception", "BaseException"}
    if isinstance(node, ast.ExceptHandler):
        return node.type is None or bool(everything & names_in(node.type))
    is_suppress = isinstance(node, ast.Call) and "suppress" in names_in(node.func)
    return is_suppress and any(everything & names_in(argument) for argument in node.args)


def test_hasattr_and_getattr_are_not_used() -> None:
    """Types define which attributes an object has."""
    wrong = [
        where(path, node.lineno)
        for path in package_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
    ]
    assert wrong == []


def test_the_training_path_is_as_short_as_the_pages_say() -> None:
    """All that training passes through are six rooms without subfolders, and seven files."""
    files = [path for room in PATH for path in (PACKAGE / "training" / room).glob("*.py")]
    files += [PACKAGE / name for name in PATH_FILES]
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    for page in ("README.md", "docs/design.md"):
        said = re.search(r"(\d+\.\d)k lines in \d+ files", (ROOT / page).read_text("utf-8"))
        assert said is not None
        assert abs(float(said[1]) - num_lines / 1000) < TOLERANCE_K, num_lines


def test_names_have_a_meaning() -> None:
    modules = [where(path, 1) for path in all_files() if path.stem in SAYS_NOTHING]
    assert modules == []
    names = [
        where(path, node.lineno, name)
        for path in package_files()
        for name, node in definitions(tree_of(path))
        if SAYS_NOTHING_IN_A_NAME & set(node.name.lower().strip("_").split("_"))
    ]
    assert names == []


def test_no_two_public_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for path in package_files():
        for name, node in definitions(tree_of(path)):
            if isinstance(node, ast.ClassDef) and is_public(name):
                found.setdefault(node.name, []).append(where(path, node.lineno))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_no_function_has_a_past_participle_as_its_name() -> None:
    """Functions are verbs. Before a noun a participle is an adjective, as in `trained_units`."""
    paths = package_files() + sorted((ROOT / "tools").rglob("*.py"))
    wrong = []
    for path, name, node in functions(paths):
        first, *others = node.name.strip("_").split("_")
        if PARTICIPLE.fullmatch(first) and (not others or others[0] in PREPOSITIONS):
            wrong.append(where(path, node.lineno, name))
    assert wrong == []


def test_the_packages_of_setup_cfg_are_the_folders_on_disk() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = set(setup["options"]["packages"].split())
    folders = {path.parent for path in PACKAGE.rglob("__init__.py")}
    on_disk = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert named == on_disk | {"april_rl.configs", "april_rl.docs", "april_rl.recipes"}
    without = {path.parent for path in package_files()} - folders
    assert without == set()
