"""`python -m april_rl`: the list of commands, their help, and the message for an unknown one."""

import sys

import pytest
from command_line import run
from printed_error import printed_error
from source_tree import ROOT

from april_rl.__main__ import main
from april_rl.start.commands import COMMANDS


def test_every_module_in_the_folder_is_a_listed_command() -> None:
    folders = [ROOT / "april_rl" / "start" / "commands", ROOT / "april_rl" / "lab" / "commands"]
    modules = [path for folder in folders for path in folder.glob("[a-z]*.py")]
    written = {path.stem for path in modules if "\ndef main(arguments" in path.read_text()}
    assert written == COMMANDS.keys()


def test_without_a_command_each_one_is_listed_with_one_line() -> None:
    done = run([sys.executable, "-m", "april_rl"], ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    for name, command in COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert command.summary in done.stdout
        assert "\n" not in command.summary
    assert (
        "  train       train with a recipe: python -m april_rl.train +recipe=tiny_cpu"
        in done.stdout
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_names_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([name, "--help"])
    except SystemExit as ended:  # argparse
        status = int(ended.code or 0)
    assert status == 0
    assert f"usage: python -m april_rl {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("simulat", "simulat is not a command of python -m april_rl; did you mean simulate?"),
        ("xyz", "xyz is not a command of python -m april_rl; choose one of "),
        ("trian", "trian is not a command of python -m april_rl; did you mean train?"),
        ("evaluate --num_samples 3", "--num_samples is not an option; settings are written KEY="),
        ("evaluate --cfg job", "--cfg is not an option; settings are written KEY=VALUE"),
        ("data a.jsonl --prompt_column b", "--prompt_column is not an option; settings are"),
        ("profile --x", "--x is not an option; settings are written KEY=VALUE"),
        ("report", "RUN is missing. python -m april_rl report --help shows what it takes"),
        ("compare", "RUN is missing. python -m april_rl compare --help shows what it takes"),
        ("report RUN --out x", "--out is not an option; it has --plan"),
        ("compare RUN --metric x", "--metric is not an option; it has --accuracy, --set, --plan"),
        ("compare RUN --accurcy 1", "--accurcy is not an option; did you mean --accuracy?"),
        ("push A B me/x", "me/x: too many arguments; the command takes EXPORT OWNER/NAME"),
        ("checkpoint lst RUN", "checkpoint has no lst; did you mean list?"),
        ("checkpoint burn RUN", "checkpoint has no burn; choose show, verify, list, prune"),
        ("checkpoint prune a keep=1", "keep is not an option; prune takes keep_last, keep_best"),
        ("checkpoint prune a keep_last=0", "keep_last must be a number >= 1, got 0"),
        ("simulate --alpha two", "--alpha: must be a number >= 1, got two"),
        ("simulate --alpha 0.5", "--alpha: must be a number >= 1, got 0.5"),
    ],
)
def test_an_unknown_command_and_wrong_arguments_of_a_command_give_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when the user sees a library's message or a page of usage, or an option is ignored."""
    try:
        status = main(words.split())
    except SystemExit as ended:  # argparse
        status = int(ended.code or 0)
    assert status == 2
    assert printed_error(capsys).startswith(message)


def test_an_argument_of_rehearse_with_dashes_is_refused_with_the_right_form(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["rehearse", "+recipe=tiny_cpu", "--gpu_gib=24"]) == 1
    assert capsys.readouterr().err == "error: --gpu_gib is not an option: write gpu_gib=24\n"
