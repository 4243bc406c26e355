"""`python -m april_rl push EXPORT OWNER/NAME`: upload an exported policy to the Hugging Face hub,
with a model card made from the records of its run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from april_rl.config.secrets import mask
from april_rl.errors import RunError
from april_rl.run.checkpointing.exports import exported_files, other_files
from april_rl.start.commands.arguments import Arguments

_DESCRIPTION = """\
Uploads an exported policy in one commit, with a model card: held-out accuracy with intervals, base
model, data, command line and all settings, as the run that EXPORT lies in has recorded them. A
README.md in EXPORT replaces that card; apart from it, only the files that an export writes are
uploaded. Keys are shown as ${oc.env:NAME}. Log in with `hf auth login`, or set HF_TOKEN.

  python -m april_rl push outputs/tiny_cpu/.../exports/step_100 me/tiny-sums --dry-run
  python -m april_rl push outputs/tiny_cpu/.../exports/step_100 me/tiny-sums --private
"""
CARD = constants.REPOCARD_NAME


class HubError(RunError):
    """The hub cannot be reached, or refuses the request."""


def main(arguments: Sequence[str]) -> int:
    """Upload, print the address of the commit and return the exit status."""
    options = _parser().parse_args(arguments)
    _check_name(options.name)
    export: Path = options.export
    written = exported_files(export)
    files = [name for name in written if name != CARD]
    for name in other_files(export):
        print(f"note: {name} is left out: it is a link, or not part of an export", file=sys.stderr)
    card = _card(export, options.name, has_own=CARD in written)
    if options.dry_run:
        print(card)
        for name in files:
            print(f"{(export / name).stat().st_size:>15,}  {name}")
        return 0
    where = "privately" if options.private else "for everyone, unless the repository is private"
    print(f"publishing {where}: {CARD}, {', '.join(files)}", flush=True)
    content = [CommitOperationAdd(CARD, card.encode())]
    content += [CommitOperationAdd(name, export / name) for name in files]
    try:
        print(f"pushed: {_push(options, content)}")
    except (HTTPError, OSError, ValueError) as error:
        raise _in_our_words(error, options.name) from error
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(
        prog="python -m april_rl push",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "export", type=Path, metavar="EXPORT", help="the folder: RUN/exports/step_N"
    )
    parser.add_argument("name", metavar="OWNER/NAME", help="the repository; created if missing")
    parser.add_argument("--private", action="store_true", help="a private repository")
    parser.add_argument("--revision", metavar="BRANCH", help="a branch; created if missing")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the card and the files, upload nothing"
    )
    return parser


def _check_name(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise HubError(f"{name} is not a valid repository name: {error}") from error
    if "/" not in name:
        raise HubError(f"{name} has no owner: give OWNER/NAME")


def _card(export: Path, name: str, *, has_own: bool) -> str:
    from april_rl.lab.commands.model_card import Records, model_card

    if has_own:
        return (export / CARD).read_text(encoding="utf-8")
    records = Records.of(export)
    if records is None:
        note = f"note: {export} is not in a run directory, so its card lacks accuracy and settings"
        print(note, file=sys.stderr)
    return str(mask(str(model_card(name, records))))


def _push(options: argparse.Namespace, content: Sequence[CommitOperationAdd]) -> str:
    api, name = HfApi(), options.name
    _check_token(api)
    api.create_repo(name, private=options.private or None, exist_ok=True)
    if options.private and not api.model_info(name).private:
        raise HubError(f"{name} exists and is public: make it private in its settings first")
    if options.revision is not None:
        api.create_branch(name, branch=options.revision, exist_ok=True)
    message = f"Push {options.export.resolve().name} with april_rl"
    commit = api.create_commit(name, content, commit_message=message, revision=options.revision)
    return str(commit.commit_url)


def _check_token(api: HfApi) -> None:
    if get_token() is None:
        raise HubError(
            "there is no token for the hub: run `hf auth login`, or set HF_TOKEN; create one with "
            f"write access at {constants.ENDPOINT}/settings/tokens"
        )
    token: dict[str, Any] = api.whoami().get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        raise HubError(
            f"the token {token.get('displayName', '')} can only read: create one with write access "
            f"at {constants.ENDPOINT}/settings/tokens"
        )


def _in_our_words(error: Exception, name: str) -> HubError:
    """Return the error of the hub or the connection, with the remedy if there is one."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    said = " ".join(str(error).split())
    if status == 401:
        return HubError(f"the hub does not know this token: run `hf auth login` again. {said}")
    if status == 403:
        return HubError(f"the token cannot write to {name}: use another owner or token. {said}")
    if isinstance(error, HTTPError | ConnectionError) and status is None:
        return HubError(f"{constants.ENDPOINT} cannot be reached: {said}")
    return HubError(f"{name} was not pushed: {said}")
