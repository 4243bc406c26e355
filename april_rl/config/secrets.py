"""Secrets: environment variables whose name marks them as secret, and how settings show them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

_SECRET = re.compile(
    r"token(?!iz)|(?<!mon)key(?!board|map)|secret|(?<!com)pass|credential|auth(?!or(?!iz))|cookie"
    r"|_pwd$|_pat$|_dsn$|jwt|webhook|connection_string|database_url",
    re.IGNORECASE,
)
_MIN_CHARACTERS = 8  # shorter secret values are not masked: "1" would be found everywhere
_forgotten: set[str] = set()  # names that this process has forgotten
_REFERENCE = re.compile(r"\$\{oc\.env:\s*([^,}\s]+)\s*\}")


def is_secret(name: str) -> bool:
    """Return whether the name of an environment variable marks its value as a secret."""
    return _SECRET.search(name) is not None


def forget_secrets(passed: Collection[str]) -> None:
    """Remove the environment variables whose name marks them as secret, except `passed`: the
    code and programs that this process runs do not need them.
    """
    for name in [name for name in os.environ if is_secret(name) and name not in passed]:
        del os.environ[name]
        _forgotten.add(name)


def hint_at_forgotten(message: str) -> str:
    """Return a hint if an error names a variable that this process has forgotten, else ""."""
    named = sorted(name for name in _forgotten if re.search(rf"\b{re.escape(name)}\b", message))
    if not named:
        return ""
    return (
        f"; {named[0]} is hidden from this process, because its name marks it as secret: list it "
        "in user_code.secrets"
    )


def mask(shown: Any) -> Any:  # noqa: ANN401
    """Return text, or plain data, with `${oc.env:NAME}` for the value of each secret variable."""
    values = {
        value: name
        for name, value in os.environ.items()
        if is_secret(name) and len(value) >= _MIN_CHARACTERS and not value.startswith("/")
    }
    if not values:
        return shown
    longest_first = sorted(map(re.escape, values), key=len, reverse=True)
    found = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)")
    return in_texts(
        shown, lambda text: found.sub(lambda at: f"${{oc.env:{values[at.group()]}}}", text)
    )


def with_references(plain: Any) -> Any:  # noqa: ANN401
    """Return settings with references to environment variables escaped, so that they stay."""
    return in_texts(plain, lambda text: _literal(text) if "oc.env:" in text else text)


def without_absent(plain: Any) -> Any:  # noqa: ANN401
    """Return settings in which a reference to a variable that this machine lacks is literal."""

    def escape_absent(text: str) -> str:
        is_absent = any(name not in os.environ for name in _REFERENCE.findall(text))
        return _literal(text) if is_absent else text

    return in_texts(plain, escape_absent)


def in_texts(plain: Any, changed: Callable[[str], str]) -> Any:  # noqa: ANN401
    """Return plain data with each of its texts changed."""
    if isinstance(plain, str):
        return changed(plain)
    if isinstance(plain, Mapping):
        return {key: in_texts(value, changed) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return type(plain)(in_texts(value, changed) for value in plain)
    return plain


def _literal(text: str) -> str:
    return text.replace("${", r"\${")
