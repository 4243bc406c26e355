"""Takes the pictures of the documentation from a page that april_rl writes, light and dark.

    python tools/pictures.py PAGE.html --sections head timeline --out docs/pictures/report

writes docs/pictures/report_light.png and report_dark.png. `head` is what stands above the charts;
other sections are named by their chart (`id` in the page). Without --sections the page is whole.
The page of a server, such as trackio's, is given by its address. Needs Chromium or Chrome, and
Pillow.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageChops

_NAMES = ("chromium", "google-chrome", "chrome")
_SCHEMES = {"light": 1, "dark": 0}  # Blink's preferredColorScheme
_MARGIN, _COLOURS = 16, 128
_DRAWING_MS = 5000


def picture(
    browser: str, address: str, *, scheme: str, size: tuple[int, int], target: Path
) -> None:
    """Write a picture of the page in a window of this size, without the empty space below."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        command = [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--hide-scrollbars", f"--user-data-dir={folder}/profile"),
            *(f"--window-size={size[0]},{size[1]}", f"--virtual-time-budget={_DRAWING_MS}"),
            f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}",
            *(f"--screenshot={shot}", address),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        image = Image.open(shot).convert("RGB")
    empty = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    box = ImageChops.difference(image, empty).getbbox()
    if box is None:
        raise ValueError(f"{address} is empty in the browser")
    target.parent.mkdir(parents=True, exist_ok=True)
    image = image.crop((0, 0, size[0], min(image.height, box[3] + _MARGIN)))
    image.quantize(_COLOURS).save(target, optimize=True)


def keep_sections(text: str, sections: Sequence[str]) -> str:
    """Return the page with only these sections; raise ValueError for one that it does not have."""
    if not sections:
        return text
    charts = [section for section in sections if section != "head"]
    missing = [chart for chart in charts if f'id="{chart}"' not in text]
    if missing:
        raise ValueError(f"the page has no chart named {', '.join(missing)}")
    kept = ", ".join(f"#{chart}" for chart in charts) or "#none"
    rules = f"main > section:not(:has({kept})) {{display: none}} footer {{display: none}}"
    if "head" not in sections:
        rules += " header {display: none}"
    return text.replace("</head>", f"<style>{rules}</style></head>", 1)


def main() -> int:
    """Return 0, or 1 with one line on stderr if a picture cannot be taken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", help="a file, or an address that begins with http")
    parser.add_argument("--sections", nargs="+", default=())
    parser.add_argument("--out", type=Path, required=True, help="path without _light.png")
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--height", type=int, default=6000, help="the page is cut there")
    args = parser.parse_args()
    size = args.width, args.height
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    try:
        if browser is None:
            raise ValueError(f"none of {', '.join(_NAMES)} is installed")
        with tempfile.TemporaryDirectory() as folder:
            address = args.page
            if not address.startswith("http"):
                page = Path(folder) / "page.html"
                text = Path(args.page).read_text(encoding="utf-8")
                page.write_text(keep_sections(text, args.sections), encoding="utf-8")
                address = page.as_uri()
            for scheme in _SCHEMES:
                target = args.out.with_name(f"{args.out.name}_{scheme}.png")
                picture(browser, address, scheme=scheme, size=size, target=target)
                print(target)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
