"""`python -m april_rl attack`: what does a reward pay for nothing?"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from april_rl.errors import RunError
from april_rl.lab.commands.output import write_page

if TYPE_CHECKING:
    from april_rl.config import TrainConfig
    from april_rl.lab.attack.page import SetResult

_USAGE = """\
usage: python -m april_rl attack [+recipe=NAME] [reward.KEY=VALUE ...] [data.KEY=VALUE ...]
           [prompts=8] [accept=NAME,NAME] [page=attack.html]
       python -m april_rl attack RUN...

  python -m april_rl attack reward.function=my_rewards:graded data.path=train.jsonl
  python -m april_rl attack outputs/my_run

Gives the reward responses that deserve nothing: an empty one, the prompt back, the right answer
among wrong ones or in the thoughts only, orders to a judge, programs that patch the tests. An
attack is paid where the reward gives it more than an honest wrong answer to the same prompt.
`prompts` of each set are attacked, with the settings of training; the page has the responses.
Of a run, saved samples are searched for texts that were paid for prompts with different answers,
or that repeat a few words. Exit status 1: something is paid; accept=several accepts it."""


def main(arguments: Sequence[str]) -> int:
    """Attack the reward that `arguments` choose; return the exit status."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE)
        return 0
    runs = [Path(word) for word in arguments if "=" not in word and word[0] not in "+~-"]
    if not runs:
        return _attack(arguments)
    if others := [word for word in arguments if Path(word) not in runs]:
        raise RunError(f"{others[0]} has no effect on the samples of a run: remove it")
    from april_rl.lab.attack.samples import search_run

    found = [line for run in runs for line in search_run(run)]
    print("\n".join(found or ["nothing was paid that looks as if it should not be"]))
    return 1 if found else 0


def _attack(arguments: Sequence[str]) -> int:
    from april_rl.config import TrainConfig
    from april_rl.config.store import ConfigError, compose_overrides, to_config
    from april_rl.config.wrong_settings import wrong_option
    from april_rl.lab.attack.attacks import ATTACKS
    from april_rl.start.planning.checks import check_settings

    own = {"prompts": "8", "accept": "", "page": "attack.html"}
    if options := [word for word in arguments if word.startswith("-")]:
        raise ConfigError(wrong_option(options[0], arguments, TrainConfig, own=tuple(own)))
    own |= dict(word.split("=", 1) for word in arguments if word.partition("=")[0] in own)
    rest = [word for word in arguments if word.partition("=")[0] not in own]
    if not {"model.path", "recipe"} & {word.lstrip("+").partition("=")[0] for word in rest}:
        rest.append("model.path=Qwen/Qwen3-4B")
    if not own["prompts"].isdecimal() or not int(own["prompts"]):
        raise RunError(f"prompts={own['prompts']} must be a whole number of at least 1")
    accepted = {*filter(None, own["accept"].strip("[]").replace(" ", "").split(","))}
    if unknown := sorted(accepted - {*ATTACKS}):
        raise RunError(f"accept={unknown[0]}: no attack has this name; use {', '.join(ATTACKS)}")
    config = check_settings(to_config(compose_overrides(rest)), loads_model=False)
    sets, path = _attack_sets(config, int(own["prompts"]), accepted), Path(own["page"])
    from april_rl.lab.attack.page import attack_page

    write_page(path, attack_page(sets), option="page=")
    paid = sorted({each.name for one in sets for each in one.results if each.wins} - accepted)
    print(f"paid for nothing: {', '.join(paid) or 'nothing else'}; {path} has the responses")
    return 1 if paid or any(each.honest.is_blind for each in sets) else 0


def _attack_sets(config: TrainConfig, num: int, accepted: Collection[str]) -> list[SetResult]:
    """Attack the reward on `num` prompts of each set that a run would train on, and say what comes
    of it.
    """
    from april_rl.lab.attack.attack import attack_set, pay_by
    from april_rl.lab.attack.page import SetResult, honest_line, result_line
    from april_rl.lab.rehearsal.stand_ins import Loader
    from april_rl.start.planning.model import without_network_go_offline
    from april_rl.task.rewards.check import reads_answers

    say = partial(print, flush=True)
    without_network_go_offline()
    loader, sets = Loader(config, say), []
    with loader.rewards() as pool:
        for wanted in loader.training_sets():
            table, chosen = loader.load(wanted, pool.columns_of(wanted.name))
            if table.has_environment:
                raise RunError(
                    f"{wanted.key}: an environment rewards these prompts, not a function"
                )
            title = f"{wanted.key}={chosen.path}"
            say(f"{title}: {min(num, len(table))} of {len(table):,} prompts")
            reads = reads_answers(pool, wanted.name)
            honest, made = attack_set(table, pay_by(pool), num=num, reads_answers=reads)
            say(honest_line(honest))
            sets.append(SetResult(title, honest, []))
            for result in made:
                say(result_line(result, accepted=result.name in accepted))
                sets[-1].results.append(result)
    return sets
