"""`python -m april_rl attack`: what does a reward pay for nothing?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from april_rl.errors import RunError

_USAGE = """\
usage: python -m april_rl attack [+recipe=NAME] [reward.KEY=VALUE ...] [data.KEY=VALUE ...]
           [prompts=8] [accept=NAME,NAME] [page=attack.html]
       python -m april_rl attack RUN...

  python -m april_rl attack reward.function=my_rewards:graded data.path=train.jsonl
  python -m april_rl attack +recipe=qwen3_4b_dapo accept=several
  python -m april_rl attack outputs/my_run

Gives the reward responses that deserve nothing: an empty one, the prompt back, the form alone, the
right answer among wrong ones or in the thoughts only, orders to a judge, programs that exit, patch
the tests or look for them. An attack is paid where the reward gives it more than an honest wrong
answer to the same prompt. Settings are those of training. `prompts` is how many prompts of each
set are attacked; the page has the responses that were paid.

With the directory of a run, its saved samples are searched for responses that were paid and
look as if they should not be: the same text for prompts with different answers, or a few words
over and over.

Exit status 0: nothing is paid for nothing; 1: something is. Accept an attack by its name:
accept=several."""


def main(arguments: Sequence[str]) -> int:
    """Attack the reward that `arguments` choose; return the exit status."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE)
        return 0
    runs = [Path(word) for word in arguments if "=" not in word and word[0] not in "+~-"]
    if runs:
        if others := [word for word in arguments if Path(word) not in runs]:
            raise RunError(f"{others[0]} has no effect on the samples of a run: remove it")
        return _search(runs)
    return _attack(arguments)


def _search(runs: Sequence[Path]) -> int:
    from april_rl.lab.attack.samples import search_run

    found = [line for run in runs for line in search_run(run)]
    print("\n".join(found or ["nothing was paid that looks as if it should not be"]))
    return 1 if found else 0


def _attack(arguments: Sequence[str]) -> int:
    from april_rl.config import TrainConfig
    from april_rl.config.store import ConfigError, compose_overrides, to_config
    from april_rl.config.wrong_settings import wrong_option
    from april_rl.start.planning.checks import check_settings

    own = {"prompts": "8", "accept": "", "page": "attack.html"}
    if options := [word for word in arguments if word.startswith("-")]:
        raise ConfigError(wrong_option(options[0], arguments, TrainConfig, own=tuple(own)))
    own |= dict(word.split("=", 1) for word in arguments if word.partition("=")[0] in own)
    rest = [word for word in arguments if word.partition("=")[0] not in own]
    names = {word.lstrip("+").partition("=")[0] for word in rest}
    if not {"model.path", "recipe"} & names:
        rest.append("model.path=Qwen/Qwen3-4B")
    num, accepted = _count(own["prompts"]), own["accept"].strip("[]").replace(" ", "")
    config = check_settings(to_config(compose_overrides(rest)), loads_model=False)
    from april_rl.lab.rehearsal.attacked_sets import attack_sets

    is_good = attack_sets(
        config,
        num=num,
        accepted=frozenset(filter(None, accepted.split(","))),
        path=Path(own["page"]),
        say=partial(print, flush=True),
    )
    return 0 if is_good else 1


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise RunError(f"prompts={text} must be a whole number of at least 1")
    return int(text)
