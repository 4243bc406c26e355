"""The rehearsal of a recipe, from its data to two steps, reported step by step.

data      every set: rows, prompts as rendered, the reward's answers to right and wrong responses
memory    the plan of the real model on the machine that the recipe names
gain      what over-sampling would bring there, by the simulator
steps     two steps on this machine with tiny random layers
findings  what is flagged, and what the recipe accepts by name
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent

from april_rl.config import TrainConfig
from april_rl.config.store import plain_config
from april_rl.errors import RunError
from april_rl.lab.attack.attack import attack_set, pay_by
from april_rl.lab.price.assumptions import Assumptions
from april_rl.lab.price.memory import RealMemory, real_layout, real_memory
from april_rl.lab.price.plan import step_table
from april_rl.lab.price.prediction import modes_beside, step_prices, work_of
from april_rl.lab.rehearsal import findings as find
from april_rl.lab.rehearsal.copied_rows import write_sampled_rows
from april_rl.lab.rehearsal.findings import Finding
from april_rl.lab.rehearsal.inspection import FormsTried, check_forms, shown_set, try_forms
from april_rl.lab.rehearsal.real_models import config_path, real_models
from april_rl.lab.rehearsal.small_run import small_run
from april_rl.lab.rehearsal.stand_ins import Loader, NamedSet
from april_rl.lab.rehearsal.tiny_model import write_tiny_model
from april_rl.lab.simulator.gpu_kinds import GPU_KINDS
from april_rl.lab.simulator.model_cost import Shape
from april_rl.run.supervision.interrupts import Interrupts
from april_rl.start.assembly.run import assemble
from april_rl.start.planning.facts import Models
from april_rl.start.planning.model import without_network_go_offline
from april_rl.start.planning.notes import inert_settings
from april_rl.task.data.prompts import PromptTable
from april_rl.task.data.tokenizer import Tokenizer
from april_rl.task.environments.loading import describe
from april_rl.task.rewards.check import NUM_ROWS_TRIED, check_tests, reads_answers
from april_rl.task.rewards.jobs import RewardError
from april_rl.task.rewards.pool import RewardPool
from april_rl.training.learner.model.sizes import ModelSizes
from april_rl.training.trainer import Trainer

Say = Callable[[str], None]

_NUM_ROWS = {"train": 64, "held_out": 8}
_ATTACKED_ROWS = 2
_ATTACKS = ("nothing", "prompt_back", "several", "in_passing", "thoughts_only", "plea")


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """One rehearsal: the recipe, a folder to write into, and what was found so far."""

    config: TrainConfig
    folder: Path
    say: Say
    assumed: Assumptions = field(default_factory=Assumptions)
    findings: list[Finding] = field(default_factory=list)
    spans: list[float] = field(default_factory=list)  # span of the reward on each training set
    rows: dict[str, Path] = field(default_factory=dict)  # a file of rows of each training set
    held_out: dict[str, Path] = field(default_factory=dict)  # the same for each evaluation set

    def run(self, *, is_quick: bool = False) -> bool:
        """Go through every stage; with `is_quick` only the stages that need neither the simulator
        nor an engine. Return whether nothing is flagged.
        """
        started = time.perf_counter()
        without_network_go_offline()
        self.say(f"rehearsal of {self.config.name}, in {self.folder}")
        models, shape = real_models(self.config, self.say)
        loader = Loader(self.config, self.say, has_agent=self._has_agent())
        self._data(loader)
        self._settings()
        memory = self._memory(models)
        if is_quick:
            self.say("not tried   gain, steps and episodes of environments: quick=true skips them")
        else:
            self._gain(memory, shape, critic=models.beside.critic)
            model = config_path(self.config.model.path, lambda _: None, key="model.path")
            self._steps(model, loader.tokenizer)
        return self._verdict(time.perf_counter() - started)

    def _data(self, loader: Loader) -> None:
        """Look at every training and evaluation set, and keep a few rows of each."""
        with loader.rewards() as rewards:
            for wanted in loader.training_sets():
                table, tried = self._set(wanted, loader, rewards, kept=self.rows)
                if tried is not None:
                    self.spans.append(tried.span)
                for check in (find.check_duplicates, find.check_left_out):
                    self.findings += check(self.config, table, set_name=wanted.key)
            for wanted in loader.held_out_sets():
                self._set(wanted, loader, rewards, kept=self.held_out)

    def _set(
        self, wanted: NamedSet, loader: Loader, rewards: RewardPool, *, kept: dict[str, Path]
    ) -> tuple[PromptTable, FormsTried | None]:
        """Load one set, show it, try the reward where it reads stated answers, and note in `kept` a
        file with some of its rows for the two steps.
        """
        name, key, _ = wanted
        # Duplicates are counted also where a run would keep them.
        table, chosen = loader.load(wanted, rewards.columns_of(name), deduplicate=True)
        tried = try_forms(table, pay_by(rewards)) if reads_answers(rewards, name) else None
        self.findings += check_forms(tried, set_name=key)
        if tried is not None:
            self._attack(table, rewards, key=key)
        self.say(shown_set(key, table, tried))
        try:
            check_tests(rewards, table, most=NUM_ROWS_TRIED)
        except RewardError as error:
            self.findings.append(Finding("tests", f"{key}: {error}"))
        kind = "train" if kept is self.rows else "held_out"
        path = self.folder / "rows" / f"{kind}_{name or 'set'}.jsonl"
        if written := write_sampled_rows(chosen, path, key=key, num_rows=_NUM_ROWS[kind]):
            kept[name] = written
        return table, tried

    def _attack(self, table: PromptTable, rewards: RewardPool, *, key: str) -> None:
        """Try some responses that deserve nothing; `python -m april_rl attack` tries more."""
        _, results = attack_set(
            table, pay_by(rewards), num=_ATTACKED_ROWS, reads_answers=True, names=_ATTACKS
        )
        if paid := [result.name for result in results if result.wins]:
            message = f"{key}: the reward pays for {', '.join(paid)}: python -m april_rl attack"
            self.findings.append(Finding("paid_for_nothing", f"{message} shows the responses"))

    def _settings(self) -> None:
        """Check settings against each other and against the reward."""
        for line in inert_settings(self.config, device=real_layout(self.config)[1].device):
            self.say(f"no effect   {line}")
        span = min(self.spans, default=1.0)
        self.findings += find.check_overlong_zone(self.config, self.assumed)
        self.findings += find.check_overlong_penalty(self.config, reward_span=span)
        self.findings += find.check_evaluation(self.config)
        self.findings += find.check_one_update(self.config)

    def _memory(self, models: Models) -> RealMemory:
        """Plan the memory of the real models on the machine that the recipe names."""
        assumed = self.assumed
        memory = real_memory(
            self.config, models, gpu_gib=assumed.gpu_gib, measured=assumed.calibration
        )
        table = "\n".join((memory.table, *memory.reasons))
        self.say(f"memory      of the real model\n{indent(table, '  ')}")
        if memory.too_large:
            self.findings.append(Finding("memory", memory.too_large))
        self.findings += [Finding("kv_cache", text) for text in memory.kv_warnings]
        return memory

    def _gain(self, memory: RealMemory, shape: Shape, *, critic: ModelSizes | None) -> None:
        """Simulate over-sampling on the machine that the recipe names."""
        if memory.layout.device == "cpu":
            self.say(
                "gain        not simulated: there is no cost model of a CPU; use "
                "`python -m april_rl profile`"
            )
            return
        assumed, kind = self.assumed, GPU_KINDS["h100"]
        measured = assumed.calibration
        rates = measured.rates(kind) if measured else kind.rates()
        work = work_of(self.config, assumed, shape=shape, critic=critic)
        prices = step_prices(memory, work, rates=rates, modes=modes_beside(self.config))
        gpu = measured.device if measured else kind.title
        self.say(
            f"gain        of schedules, simulated for {gpu} GPUs and "
            f"{assumed.lengths_in_words(self.config)};\n            python -m april_rl plan has "
            f"other GPUs and money\n{indent(step_table(memory, prices), '  ')}"
        )

    def _has_agent(self) -> bool:
        try:
            return describe(self.config.environment, self.config.user_code).is_agent
        except RunError as error:
            self.findings.append(Finding("environment", str(error)))
            return False

    def _steps(self, model: str, tokenizer: Tokenizer) -> None:
        """Run two steps of a tiny model; an error in them is a finding."""
        folder = self.folder / "model"
        num_parameters = write_tiny_model(
            folder, config_path=model, num_tokens=tokenizer.num_tokens
        )
        tokenizer.save(folder)
        self.say(
            f"steps       two, on this machine, {num_parameters / 1e6:.0f} million random "
            "parameters, with noise added to rewards: there is nothing else to learn from"
        )
        config = small_run(self.config, model=str(folder), rows=self.rows, held_out=self.held_out)
        try:
            with Trainer(
                config,
                run_dir=self.folder / "run",
                plain_config=plain_config(config),
                interrupts=Interrupts(),
                build=assemble,
            ) as trainer:
                trainer.run()
        except RunError as error:
            self.findings.append(Finding("steps", f"the two steps failed: {error}"))

    def _verdict(self, took_s: float) -> bool:
        accepted = self.assumed.accept
        flagged = [finding for finding in self.findings if finding.name not in accepted]
        for finding in self.findings:
            mark = "accepted" if finding.name in accepted else "FLAGGED"
            self.say(f"{mark:<12}{finding.name}: {finding.message}")
        unused = sorted(set(accepted) - {finding.name for finding in self.findings})
        if unused:
            self.say(f"note        accept names {', '.join(unused)}, which was not found")
        result = f"{len(flagged)} flagged" if flagged else "nothing is flagged"
        self.say(f"result      {result}, after {took_s:.0f} s")
        return not flagged
