"""Pictures for the documentation: parts of a real page, drawn by a real browser."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from report_runs import make_run
from source_tree import ROOT

from april_rl.lab.report.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def take(page: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "pictures.py"), str(page), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not installed here")
def test_a_picture_shows_only_the_named_parts_in_light_and_dark(tmp_path: Path) -> None:
    """Fails when the picture shows the whole page, has empty space below, or has only one colour
    scheme.
    """
    page = write_report(make_run(tmp_path / "run")).path
    args = ("--sections", "ages", "--out", str(tmp_path / "ages"), "--width", "700")
    done = take(page, *args)
    assert done.returncode == 0, done.stderr
    light, dark = (
        Image.open(tmp_path / f"ages_{name}.png").convert("L") for name in ("light", "dark")
    )
    assert light.size == dark.size
    assert light.width == 700
    assert 150 < light.height < 700
    assert dark.getpixel((2, 2)) < 60 < 200 < light.getpixel((2, 2))


def test_a_part_that_the_page_lacks_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<html><head></head><body><main id="x"></main></body></html>')
    done = take(page, "--sections", "head", "timelime", "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stderr in (
        "error: the page has no chart named timelime\n",
        "error: none of chromium, google-chrome, chrome is installed\n",
    )
