"""The Vega bundle that draws the charts of a page: JavaScript of the package vl-convert-python."""

from __future__ import annotations

import os
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

LICENCE = "Vega, Vega-Lite and Vega-Embed: BSD-3-Clause, University of Washington"
_SNIPPET = "window.vegaEmbed = vegaEmbed;"


def vega_bundle() -> str | None:
    """Return the bundle, 0.9 MB; None when vl-convert-python is not installed.

    Making it takes two seconds, so it is kept in the user's cache.
    """
    if find_spec("vl_convert") is None:
        return None
    cached = _cache() / f"vega-{metadata.version('vl-convert-python')}.js"
    if cached.is_file():
        return cached.read_text(encoding="utf-8")
    import vl_convert

    bundle = str(vl_convert.javascript_bundle(_SNIPPET))
    _keep(cached, bundle)
    return bundle


def _cache() -> Path:
    """Return $APRIL_RL_CACHE, or ~/.cache/april_rl."""
    return Path(os.environ.get("APRIL_RL_CACHE") or Path.home() / ".cache" / "april_rl")


def _keep(path: Path, text: str) -> None:
    """Write the file whole or not at all; without a writable cache the bundle is made each time."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
