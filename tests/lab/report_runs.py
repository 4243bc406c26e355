"""Run directories like those of real runs, written by the real collector on simulated engines."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from april_rl.config import TrainConfig
from april_rl.lab.simulator.engine_cost import EngineCost
from april_rl.lab.simulator.length_distributions import Lognormal
from april_rl.lab.simulator.simulation import Scenario, simulate
from april_rl.metrics import Metrics
from april_rl.run.tracking import samples_file
from april_rl.run.tracking.metrics_file import MetricsFile
from april_rl.run.tracking.samples_file import SampleRecord, write_samples, write_timeline
from april_rl.training.rollout.collector import Collection
from april_rl.training.rollout.measures.rollout_metrics import rollout_metrics
from april_rl.training.rollout.measures.timeline import timeline_of

NUM_GROUPS, GROUP_SIZE, REST_S = 4, 4, 0.25
SCENARIO = Scenario(
    cost=EngineCost(step_s=0.01, sample_s=0.0005, context_token_s=0.0, prefill_token_s=1e-5),
    length_of=Lognormal(median_tokens=60, sigma=1.1),
    num_groups=NUM_GROUPS,
    group_size=GROUP_SIZE,
    max_response_tokens=400,
    tick_steps=4,
    rest_s=REST_S,
)
HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=alert(1)>&'\"\u2028<!--"


def make_run(
    run_dir: Path,
    *,
    scenario: Scenario = SCENARIO,
    factor: float = 2.0,
    num_steps: int = 6,
    response: str = "a response",
    seed: int = 0,
    accuracy: Sequence[float] = (0.5, 0.7),
) -> Path:
    """Write the directory of a finished run whose held-out accuracy rises from `accuracy`[0] before
    the first step to `accuracy`[1] at the last.
    """
    run_dir.mkdir(parents=True)
    config = TrainConfig()
    config.name, config.model.path, config.data.path = HOSTILE, "model", "data"
    config.seed, config.runtime.num_workers = seed, 1
    config.trainer.num_groups, config.trainer.num_steps = scenario.num_groups, num_steps
    config.rollout.group_size = scenario.group_size
    config.rollout.max_response_tokens = scenario.max_response_tokens
    config.rollout.over_sampling_factor, config.rollout.refill = factor, factor > 1
    OmegaConf.save(OmegaConf.structured(config), run_dir / "config.yaml")
    scenario = replace(scenario, length_of=replace(scenario.length_of, seed=seed))
    with closing(MetricsFile(run_dir / "metrics.jsonl")) as file:
        file.append(0, _accuracy_metrics(accuracy[0]))

        def record(version: int, collection: Collection) -> None:
            step = version + 1
            # The simulated clock does not move in a step that finds all of its groups ready.
            collection.record.time_s = collection.record.time_s or 1e-3
            reached = accuracy[0] + (accuracy[1] - accuracy[0]) * step / num_steps
            file.append(step, _row(collection, version, scenario) | _accuracy_metrics(reached))
            write_samples(
                run_dir / "samples", step, _records(collection, version, response=response)
            )
            write_timeline(run_dir / "timeline", step, timeline_of(collection.record).plain())

        simulate(
            scenario,
            over_sampling_factor=factor,
            refill=factor > 1,
            num_steps=num_steps,
            warmup_steps=0,
            on_step=record,
        )
    return run_dir


def _accuracy_metrics(accuracy: float) -> dict[str, float]:
    key = "eval/held_out/avg_at_k"
    return {key: accuracy, f"{key}_low": accuracy - 0.05, f"{key}_high": accuracy + 0.05}


def _row(collection: Collection, version: int, scenario: Scenario) -> dict[str, float]:
    tokens = [
        (version - completion.policy_version, len(completion.token_ids))
        for scored in collection.groups
        for sample in scored.group.samples
        for completion in sample.completions
    ]
    total = sum(count for _, count in tokens)
    shares = {
        f"staleness/token_frac_age_{age}": sum(n for a, n in tokens if a == age) / total
        for age in range(6)
    }
    metrics = Metrics(
        {
            **rollout_metrics(
                collection.record, num_needed=scenario.num_groups * scenario.group_size
            ),
            **collection.metrics,
            **shares,
        }
    )
    return {
        **metrics.read(),
        "staleness/age_mean": sum(age * n for age, n in tokens) / total,
        "staleness/age_max": max(age for age, _ in tokens),
        "staleness/off_policy_token_frac": 1 - shares["staleness/token_frac_age_0"],
        "reward/mean": 0.5 + 0.01 * version,
        "reward/no_signal_frac": 0.2,
        "reward/errors": 0.0,
        "mismatch/logprob_abs_mean": 0.002,
        "loss/teacher_kl": 0.5 / (1 + version),
        "critic/explained_variance": 0.1 * version,
        "critic/error_new": 0.4,
        "mismatch/logprob_abs_max": 0.1,
        "loss/total": -0.01,
        "loss/entropy": 0.6 - 0.01 * version,
        "loss/grad_norm": 0.3,
        "loss/clip_frac": 0.002,
        "loss/behaviour_kl": 0.004,
        "time/rollout_s": collection.record.time_s,
        "time/score_s": 0.0,
        "time/update_s": 0.8 * scenario.rest_s,
        "time/weight_sync_s": 0.1 * scenario.rest_s,
        "time/step_s": collection.record.time_s + scenario.rest_s,
    }


def _records(collection: Collection, version: int, *, response: str) -> list[SampleRecord]:
    found = []
    made = samples_file.records_of(
        collection.groups, None, decode=lambda _: response, policy_version=version
    )
    for record in made:
        num = len(record.ages)
        ends = tuple(len(response) * n // num for n in range(1, num + 1)) if num > 1 else ()
        parts = ((response[:20], record.reward),)
        found.append(replace(record, advantage=0.0, reward_parts=parts, ends=ends))
    return found
