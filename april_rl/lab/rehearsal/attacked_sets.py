"""Attacks the reward on every set that a configuration trains on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import training_sets
from april_rl.errors import RunError
from april_rl.lab.attack.attack import attack_set, pay_by
from april_rl.lab.attack.attacks import ATTACKS
from april_rl.lab.attack.page import SetResult, attack_page, honest_line, result_line
from april_rl.lab.rehearsal import stand_ins
from april_rl.start.planning.model import without_network_go_offline
from april_rl.task.data.prompts import PromptTable, load_prompts
from april_rl.task.rewards.check import reads_answers
from april_rl.task.rewards.pool import RewardPool

Say = Callable[[str], None]


def attack_sets(
    config: TrainConfig, *, num: int, accepted: Collection[str], path: Path, say: Say
) -> bool:
    """Attack the reward on `num` prompts of each set, say what comes of it, and write the page to
    `path`. Return whether nothing is paid but what is accepted, and no reward is blind.
    """
    started = time.perf_counter()
    if unknown := sorted({*accepted} - {*ATTACKS}):
        raise RunError(f"accept={unknown[0]}: no attack has this name; use {', '.join(ATTACKS)}")
    without_network_go_offline()
    tokenizer = stand_ins.find_tokenizer(config.model.path, say)
    sets = []
    with closing(RewardPool(config.reward, config.user_code, decode=tokenizer.decoder())) as pool:
        load = partial(load_prompts, tokenizer=tokenizer)
        for dataset, name, table in _tables(config, pool, load, say):
            say(f"{name}: {min(num, len(table))} of {len(table):,} prompts")
            reads = reads_answers(pool, dataset)
            honest, made = attack_set(table, pay_by(pool), num=num, reads_answers=reads)
            say(honest_line(honest))
            results = []
            for result in made:
                say(result_line(result, accepted=result.name in accepted))
                results.append(result)
            sets.append(SetResult(name, honest, results))
    try:
        path.write_text(attack_page(sets), "utf-8")
    except OSError as error:
        raise RunError(f"page={path} cannot be written: {error.strerror}") from error
    paid = {each.name for one in sets for each in one.results if each.wins} - {*accepted}
    found = f"paid for nothing: {', '.join(sorted(paid))}" if paid else "nothing else is paid"
    say(f"result   {found}, after {time.perf_counter() - started:.0f} s; {path} has the texts")
    return not paid and not any(each.honest.is_blind for each in sets)


def _tables(
    config: TrainConfig, pool: RewardPool, load: Callable[..., PromptTable], say: Say
) -> Iterator[tuple[str, str, PromptTable]]:
    """Yield data set, name for people and prompts of each training set."""
    for dataset, chosen in training_sets(config.data).items():
        key = f"data.sources.{dataset}.path" if dataset else "data.path"
        load_set = partial(
            load,
            key=key,
            dataset=dataset,
            columns=pool.columns_of(dataset),
            max_prompt_tokens=config.data.max_prompt_tokens,
            deduplicate=config.data.deduplicate,
            seed=config.seed,
        )
        table, chosen = stand_ins.find_prompts(load_set, chosen, say)
        if table.has_environment:
            raise RunError(f"{key}: an environment rewards these prompts, not a function alone")
        yield dataset, f"{key}={chosen.path}", table
