"""The run around the step: evaluations, checkpoints, counters.

Collector, packer, evaluator and tracker are real; engines, workers and scores are fakes.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import metric_keys
import pytest
from fake_engine import FakeEngines
from fake_outside import FakeScorer
from rollout_runs import lognormal
from trainer_fakes import FakeTokenizer, FakeWorkers, NoInterrupts, rows_of

from april_rl.config import TrainConfig
from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Advantage
from april_rl.config.schema import CheckpointConfig, RolloutConfig, TrainerConfig
from april_rl.config.task import EvaluationConfig
from april_rl.errors import DataError
from april_rl.metrics import Mean, Metrics, Sum
from april_rl.run.checkpointing.checkpointer import Checkpointer
from april_rl.run.checkpointing.resume import CHECKPOINTS, Resumed, load
from april_rl.run.tracking.terminal import View
from april_rl.run.tracking.tracker import config_text
from april_rl.start.assembly.collector import build_collector
from april_rl.start.assembly.run_directory import take_over
from april_rl.task.data.samplers import NewSampler, Shuffled
from april_rl.task.data.stream import PromptStream
from april_rl.task.evaluation.evaluate import evaluate_all
from april_rl.task.evaluation.evaluator import Evaluator
from april_rl.task.evaluation.held_out import HeldOut
from april_rl.task.evaluation.settings import SetSampling
from april_rl.training.algorithm.advantages import Credits, credits_of, grpo
from april_rl.training.algorithm.age import age_weights, decay
from april_rl.training.algorithm.aggregation import token_mean
from april_rl.training.batch.packing import Packer
from april_rl.training.batches import Batches
from april_rl.training.parts import RunParts
from april_rl.training.rollout.measures.timeline import read_timeline
from april_rl.training.trainer import Trainer
from april_rl.types import OnStep, Prompt

BUDGET = 40
PROMPT = Prompt(id=0, token_ids=(1, 2), text="", answer="", source="held out")
HELD_OUT = HeldOut(
    name="held_out",
    path="held_out",
    prompts=[replace(PROMPT, id=i) for i in range(3)],
    sampling=SetSampling(
        num_samples=1, temperature=1.0, top_p=1.0, max_response_tokens=BUDGET, max_prompts=None
    ),
    function="a",
    answer_of=lambda _, response: response,
)


class CountingScorer(FakeScorer):
    """A scorer that counts its failures like the reward pool, and records how many there were each
    time scores were settled.
    """

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.counts: Counter[str] = Counter()
        self.failed: list[int] = []  # the prompt of each failure
        # Failures in training that were known after each wait for all scores.
        self.settled: list[int] = []

    def submit(self, sample, *, group_size) -> None:
        if sample.prompt.id < 0 and sample.id in self.submitted:
            self.submitted.remove(sample.id)  # held-out samples are the same in every evaluation
        super().submit(sample, group_size=group_size)

    def collect(self, timeout_s, look=None):  # noqa: ARG002
        scores = super().collect(timeout_s)
        failed = [score.sample_id.prompt_id for score in scores if score.value is None]
        self.counts["errors"] += len(failed)
        self.failed += failed
        if timeout_s is None and scores and all(score.sample_id.prompt_id >= 0 for score in scores):
            self.settled.append(len(failed))
        return scores

    def save(self) -> dict[str, str]:
        return {"counter": "[1]"}

    def on_evaluation_end(self) -> None:
        pass

    def metrics(self) -> Metrics:
        return Metrics({"reward/errors": Sum(self.counts.pop("errors", 0))})


def settings(
    *, num_steps: int, drain_steps: int = 0, every: int = 100, export_every: int | None = None
):
    return TrainConfig(
        trainer=TrainerConfig(num_steps=num_steps, num_groups=2),
        checkpoint=CheckpointConfig(export_every_steps=export_every),
        rollout=RolloutConfig(
            group_size=2,
            over_sampling_factor=2.0,
            max_response_tokens=BUDGET,
            drain_steps=drain_steps,
            tick_steps=2,
        ),
        evaluation=EvaluationConfig(every=every),
    )


def run(
    config: TrainConfig,
    run_dir: Path,
    scorer: CountingScorer | None = None,
    *,
    advantages: Credits | None = None,
    held_out: HeldOut | None = HELD_OUT,
    resumed: Resumed | None = None,
    interrupts: NoInterrupts | None = None,
    workers_type: type[FakeWorkers] = FakeWorkers,
    new_sampler: NewSampler | None = None,
    teacher: Any = None,
    on_step: OnStep | None = None,
) -> FakeWorkers:
    """Do a whole run; return its workers."""
    engines = FakeEngines(lognormal(8, 0.6), num_engines=1, budget=BUDGET)
    scorer = scorer or CountingScorer()
    workers = workers_type(engines, run_dir)

    def build(config, *, run_dir, plain, resumed, **_) -> RunParts:
        view = View(title="", num_steps=1)
        quiet = replace(config.tracking, backends=[])
        prompts = PromptStream([PROMPT], seed=0, new_sampler=new_sampler)
        if resumed is not None:
            prompts.restore(resumed.state["prompts"])
        return RunParts(
            view=view,
            take_over=partial(
                take_over, run_dir, replace(config, tracking=quiet), shown=plain, resumed=resumed
            ),
            save_prompts=prompts.save,
            model={},
            checkpointer=Checkpointer(
                run_dir / CHECKPOINTS,
                config.checkpoint,
                workers=workers,
                config_text=config_text(plain),
                about={},
                tell=view.message,
                resumed=resumed.path if resumed else None,
            ),
            decode=FakeTokenizer().decode,
            outside=scorer,
            workers=workers,
            collector=build_collector(config, engines, scorer, prompts=prompts),
            batches=Batches(
                config,
                Packer(
                    num_ranks=1,
                    max_tokens=1000,
                    num_minibatches=1,
                    max_staleness=5,
                    max_response_tokens=BUDGET,
                    age_weights=partial(age_weights, weight_of_age=decay(1.0)),
                    aggregation=token_mean,
                    hidden_size=8,
                ),
                advantages or credits_of(Advantage.grpo, config.reward),
                teacher.logprobs if teacher else None,
            ),
            evaluate=partial(
                evaluate_all,
                [held_out] if held_out else [],
                Evaluator(
                    engines,
                    scorer,
                    temperature=config.rollout.temperature,
                    num_slots=8,
                    tick_steps=4,
                    tick_timeout_s=1.0,
                    seed=0,
                ),
                decode=FakeTokenizer().decode,
            ),
        )

    with Trainer(
        config,
        run_dir=run_dir,
        plain_config={},
        interrupts=interrupts or NoInterrupts(),
        resumed=resumed,
        build=build,
        on_step=on_step,
    ) as trainer:
        trainer.run()
    return workers


class WithoutPlainState(Shuffled):
    def save(self):
        return {"seen": {self._cursor}}


def test_a_sampler_whose_state_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    """Fails when the run continues without checkpoints."""
    with pytest.raises(DataError, match=r"data\.sampler: .* set is not JSON serializable"):
        run(settings(num_steps=2), tmp_path, new_sampler=lambda n, _: WithoutPlainState(n, 0))


def evaluated_steps(rows: list[dict[str, float]]) -> list[float]:
    return [row["step"] for row in rows if "eval/held_out/avg_at_k" in row]


def test_evaluations_and_checkpoints_happen_when_they_are_due(tmp_path: Path) -> None:
    """Each version once, even the last one, which is due for two reasons."""
    workers = run(settings(num_steps=4, every=2, export_every=2), tmp_path)
    assert evaluated_steps(rows_of(tmp_path)) == [0, 2, 4]
    assert [name for name, _ in workers.exports] == ["step_2", "step_4"]


def test_the_advantages_of_a_step_are_computed_in_one_call_after_penalties(
    tmp_path: Path,
) -> None:
    """Estimators over the batch need the whole batch. Fails when groups are passed one by one, or
    without the overlong penalty (at least 1000 / 40 here, since a sample has one token or more).
    """
    calls = []

    def advantages(groups, penalized):
        finished = [[each.is_finished for each in scored.group.samples] for scored in groups]
        assert finished == [[True] * 2] * 2
        calls.append([list(rewards) for rewards in penalized])
        return [grpo(rewards) for rewards in penalized]

    penalties = AlgorithmConfig(overlong_buffer_frac=1.0, overlong_penalty=1000.0)
    config = replace(settings(num_steps=2), algorithm=penalties)
    run(config, tmp_path, advantages=advantages)
    assert [[len(rewards) for rewards in groups] for groups in calls] == [[2, 2], [2, 2]]
    assert all(reward < 0 for call in calls for rewards in call for reward in rewards)
    assert all(row["reward/mean"] >= 0 for row in rows_of(tmp_path)[1:]), "before the penalty"
    assert "before the overlong penalty" in metric_keys.describe("reward/mean").meaning


def test_a_drained_run_that_ends_early_is_evaluated_before_its_last_checkpoint(
    tmp_path: Path,
) -> None:
    """Fails when the loop ends without evaluating the policy that is kept, or when the evaluation
    gets its own row, for a step that was never trained.
    """
    workers = run(settings(num_steps=9, drain_steps=8), tmp_path)
    rows = rows_of(tmp_path)
    trained = [row for row in rows if "reward/mean" in row]
    num_steps = len(trained)
    assert 1 < num_steps < 9, "not what this test is about"
    assert trained[-1]["ledger/parked"] == trained[-1]["ledger/ready"] == 0
    assert [row["step"] for row in rows] == list(range(num_steps + 1))
    assert evaluated_steps(rows) == [0, num_steps]
    (export,) = workers.exports
    assert export[0] == f"step_{num_steps}"
    assert "eval/held_out/avg_at_k" in export[1]


def test_a_run_that_ends_early_after_an_evaluation_is_not_evaluated_again(
    tmp_path: Path,
) -> None:
    """Fails when every early end evaluates."""
    run(settings(num_steps=9, drain_steps=8, every=1), tmp_path)
    rows = rows_of(tmp_path)
    assert all("reward/mean" in row for row in rows[1:])
    assert evaluated_steps(rows) == [row["step"] for row in rows]


def test_failures_of_an_evaluation_are_counted_there_and_not_in_training(tmp_path: Path) -> None:
    """The first held-out prompt gets no reward. Fails when the evaluator leaves the pool's counts
    to the next step.
    """
    run(settings(num_steps=3, every=1), tmp_path, CountingScorer(failing={-1}))
    rows = rows_of(tmp_path)
    assert [row["eval/held_out/errors"] for row in rows] == [1, 1, 1, 1]
    assert [row["reward/errors"] for row in rows[1:]] == [0, 0, 0]


def test_failures_settled_before_an_evaluation_count_in_the_next_step(
    tmp_path: Path,
) -> None:
    """Scores of parked groups come late. Fails when the evaluation takes or drops their counts."""
    scorer = CountingScorer(delay=12, failing=range(0, 100, 2))
    run(settings(num_steps=6, every=1), tmp_path, scorer)
    rows = rows_of(tmp_path)
    assert sum(scorer.settled[:-1]) > 0, "not what this test is about"
    in_training = sum(prompt_id >= 0 for prompt_id in scorer.failed) - scorer.settled[-1]
    assert sum(row["reward/errors"] for row in rows[1:]) == in_training
    assert {row["eval/held_out/errors"] for row in rows} == {0}


def test_an_existing_export_is_written_again(tmp_path: Path) -> None:
    """Fails when a folder from an earlier start counts as written by this one."""
    (tmp_path / "exports" / "step_2").mkdir(parents=True)
    workers = run(settings(num_steps=2), tmp_path)
    assert [name for name, _ in workers.exports] == ["step_2"]


def test_a_mismatch_above_the_limit_is_reported_once_and_the_run_continues(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    """Fails when no one reads the metric, or it is reported at every step."""
    measured = Metrics({"mismatch/logprob_abs_mean": Mean(0.12)})
    monkeypatch.setattr(FakeWorkers, "update", lambda *_: measured)
    run(settings(num_steps=3), tmp_path)
    assert len(rows_of(tmp_path)) > 3
    assert capsys.readouterr().out.count("engine and learner disagree by 0.12 nats") == 1


def test_the_timeline_of_a_saved_step_has_the_ticks_of_its_engine(tmp_path: Path) -> None:
    run(settings(num_steps=2), tmp_path)
    for row in rows_of(tmp_path)[-2:]:
        found = read_timeline(tmp_path / "timeline" / f"step_{row['step']:05d}.json")
        assert sum(tick.elapsed_s for tick in found.ticks) == row["rollout/engine_s"] > 0


def test_a_checkpoint_has_the_states_of_the_rewards(tmp_path: Path) -> None:
    run(settings(num_steps=2), tmp_path)
    saved = load("auto", tmp_path)
    assert saved is not None
    assert saved.state["rewards"] == {"counter": "[1]"}
