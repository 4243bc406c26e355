"""Every metric a run logs, with its unit and its meaning: docs/metrics.md, dashboards and reports
read this table.

A `*` stands for one part that the run decides: an age, a data source, a reward function, an
evaluation set. Dashboards, scripts and resumed runs may rely on frozen keys: keys may be added,
but none removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Key(NamedTuple):
    """A metric, or a family of metrics: its key, unit and meaning, and whether it is frozen."""

    key: str
    unit: str
    meaning: str
    is_frozen: bool = False

    @property
    def stage(self) -> str:
        return self.key.partition("/")[0]


# A line for each metric below its stage: the rest of the key, its unit, its meaning.
_TABLE = """
rollout, frozen
    time_s | s | rollout phase of the step, from the first request to the last parked sample
    generated_tokens_per_s | tokens/s | response tokens generated per second of rollout
    finished_samples_per_s | samples/s | samples finished per second of rollout
    in_flight_mean | samples | requests that an engine computes, averaged over rollout/time_s
    occupancy | share | in_flight_mean ÷ slots; slots are empty while scores are awaited
    resumed_samples | samples | parked samples that continued in this step
    parked_groups | groups | groups parked at the end of the step
    parked_tokens | tokens | response tokens of parked groups at the end of the step
    ready_groups | groups | groups complete and scored at the end, left for the next step
    reprefill_tokens | tokens | prompt and response tokens computed again to resume samples
    rejected_groups | groups | groups rejected by dynamic sampling: all rewards are equal
    truncated_frac | share | trained responses that ended at the token budget
    response_tokens_mean | tokens | mean length of the trained responses
    response_tokens_p50 | tokens | median length of the trained responses
    response_tokens_p95 | tokens | 95th percentile of the trained responses' lengths
    response_tokens_p99 | tokens | 99th percentile of the trained responses' lengths
    response_tokens_max | tokens | length of the longest trained response
    over_sampling_factor | ratio | α: slots divided by the samples a step needs
    stop_s | s | from the decision to stop until every unfinished sample is parked
rollout
    controller_s | s | rollout time in which the controller waits neither for engines nor scores
    engine_s | s | time an engine computes in the rollout, averaged over engines
    kept_samples | samples | resumed samples whose KV cache was kept, without a prefill
    preempted_samples | samples | times a running sample was evicted from a full KV cache
    preempted_tokens | tokens | tokens of KV cache lost by preemption and computed again
    kv_cache_frac | share | largest share of an engine's KV cache in use
    dropped_groups | groups | groups dropped because a reward, environment or engine failed
    failed_attempts | samples | requests that failed in an engine; most are tried again
    prompt_tokens_mean | tokens | mean prompt length of the trained groups
staleness, frozen
    age_mean | steps | mean age of the trained tokens: version trained minus version sampled
    age_max | steps | age of the oldest trained token
    off_policy_token_frac | share | response tokens of age 1 or more; see also old_cache_token_frac
    token_frac_age_* | share | response tokens of this age
staleness
    old_cache_token_frac | share | response tokens of age 0 sampled on a kept KV cache of an \
older policy. off_policy_token_frac leaves them out, and so does mismatch
    versions_mean | versions | mean number of policy versions that sampled one response
    masked_tokens | tokens | response tokens older than rollout.max_staleness: no loss weight
    age_mean_len_* | steps | age_mean by response length: up to 1/8, 1/4, 1/2, all of the budget
    off_policy_token_frac_len_* | share | off-policy tokens by length, as in age_mean_len_*
reward, frozen
    mean | reward | mean reward of the trained samples, before the overlong penalty
    std | reward | standard deviation of the trained samples' rewards
    no_signal_frac | share | scored groups whose rewards are all equal
    errors | samples | rewards that failed for good: timeouts, crashes and no_scores
reward
    */mean | reward | mean of one reward function, before its weight
    timeouts | samples | rewards that took longer than reward.hard_timeout_s
    crashes | samples | rewards whose process ended or raised an error
    no_scores | samples | rewards that returned no finite number
    soft_timeouts | samples | comparisons over a third of reward.hard_timeout_s, scored as 0
    retries | samples | rewards that were tried again after a failure
environment
    turns_mean | turns | mean turns of the trained samples that have an environment
    contexts_mean | contexts | mean contexts of these samples; 1 if no sample begins a new one
    observation_tokens_mean | tokens | mean tokens that environments added to these samples
    step_s | s | mean time that an environment took to reply
    empty_slots_frac | share | empty slots that samples waiting for their environment could \
fill, averaged over the rollout
    calls | calls | calls that environments made by Context.once
    repeated_calls | calls | calls made again, because it was unknown whether they had ended
    errors | samples | environments that failed for good; their groups are dropped
    timeouts | calls | calls that took longer than environment.step_timeout_s
    deaths | processes | processes with environments that ended or were killed
    retries | calls | calls that were tried again, with the episode built again
    replays | episodes | episodes built again after their process, or the run, had ended
    out_of_room | samples | episodes that ended at environment.max_observation_tokens
loss, frozen
    total | nats | the loss, averaged over the optimizer steps of the update
    clip_frac | share | trained tokens whose ratio is clipped
    behaviour_kl | nats | KL(engine's policy when sampled ‖ learner): staleness and mismatch
    entropy | nats | mean entropy of the learner's next-token distributions
    grad_norm | norm | gradient norm before clipping, averaged over optimizer steps
    ratio_mean | ratio | exp(learner - behaviour log-probability), mean; 1 is on-policy
    ratio_max | ratio | the largest such ratio
    is_weight_mean | ratio | mean importance weight of the off-policy correction
    age_weight_mean | ratio | mean weight that tokens have by their age
loss
    masked_frac | share | trained tokens that a response or token mask leaves out
    entropy_coefficient | weight | weight of the entropy bonus, with algorithm.entropy_target
    reference_kl | nats | KL(learner ‖ frozen reference), where the run has a reference
    teacher_kl | nats | KL(learner ‖ teacher), where the run has a teacher
    own/* | any | metrics of your own loss, averaged over the trained tokens
    lr | rate | learning rate, averaged over the optimizer steps
    bad_step | 0 or 1 | 1: the update skipped its first bad minibatch and the ones after it
critic
    loss | reward² | value loss, averaged over the critic's optimizer steps
    grad_norm | norm | the critic's gradient norm before clipping
    explained_variance | share | share of the returns' variance that the values explain, \
before the update
    error_new | reward | mean distance between value and return, on tokens of age 0
    error_old | reward | the same on tokens of earlier policies
mismatch, frozen
    logprob_abs_mean | nats | mean difference of log-probabilities, engine against learner, \
on tokens that the same weights sampled
    logprob_abs_max | nats | the largest such difference
mismatch
    to_*_tokens | nats | the mean at this depth in the context or less, down to a quarter of it
ledger, frozen
    opened | groups | prompts taken since the run began: the sum of the counts below
    in_flight | groups | groups being generated or scored; 0 between steps
    parked | groups | open groups that wait for the next step
    ready | groups | groups complete and scored that wait to be trained
    trained | groups | groups trained since the run began
    rejected | groups | groups without a signal since the run began
    dropped | groups | groups lost so far to a failed reward, environment or engine
time, frozen
    rollout_s | s | rollout phase
    score_s | s | part of the rollout that waits for scores with nothing left to generate
    update_s | s | learner's update, slowest worker
    weight_sync_s | s | learner's weights into the engines, slowest worker
    checkpoint_s | s | time that training stood still for a checkpoint or an export
    step_s | s | whole step, without the evaluation and checkpoint after it
time
    teacher_s | s | waiting for a teacher on a server (teacher.base_url)
    evaluation_s | s | evaluation of all held-out sets
    run_s | s | duration of the run so far, including the time before a resume
    tracking_s | s | recording the step before: metrics.jsonl, terminal, trackers
throughput, frozen
    trained_tokens_per_s | tokens/s | trained tokens per second of the step
throughput
    trained_tokens | tokens | response tokens that the step trained
    trained_tokens_total | tokens | response tokens trained since the run began
sync, frozen
    bytes | bytes | weights sent to the engine in a sync
eval, frozen
    */avg_at_k | reward | mean reward over prompts and their k samples, by the function that \
decides whether a sample is right; an accuracy if its values are 0 or 1
    */pass_at_k | share | prompts that at least one of k samples solves; unbiased
    */response_tokens_mean | tokens | mean response length
eval
    */maj_at_k | share | prompts whose most frequent answer is right
    */*_low | as estimate | lower end of the estimate's 95 % interval
    */*_high | as estimate | upper end of the estimate's 95 % interval
    */truncated_frac | share | responses that ended at the token budget
    */errors | samples | samples without a reward, because it or the engine failed
    */left_out_prompts | prompts | prompts left out because a sample has no reward
source
    */reward_mean | reward | mean reward of the trained samples of this data source
    */groups | groups | trained groups of this data source
    */no_signal_frac | share | trained groups of this source whose rewards are all equal
    */reward/*/mean | reward | mean of one reward function on this source
memory
    worker_rss_bytes | bytes | resident memory of the largest worker process
    controller_rss_bytes | bytes | resident memory of the controller process
    host_used_frac | share | memory in use on the fullest machine, by all processes
    gpu_used_frac | share | memory in use on the fullest GPU, with the engine awake
    gpu_peak_bytes | bytes | most memory that torch held on a GPU during the step
    buffer_bytes | bytes | tokens and log-probabilities of parked and ready groups
checkpoint
    write_s | s | time to write the last checkpoint, while training continued
    bytes | bytes | size of the last checkpoint
restart
    count | restarts | restarts so far after a lost worker
    lost_s | s | training time lost by the restarts
histogram
    response_tokens | tokens | lengths of the trained responses
    age | steps | ages of the trained tokens
    reward | reward | rewards of the trained samples
    advantage | advantage | advantages of the trained samples; absent with a critic
    ratio | ratio | ratios of the trained tokens, learner over behaviour; 2 stands for 2 and more
"""


def _read(table: str) -> Iterator[Key]:
    stage = frozen = ""
    for line in table.strip().splitlines():
        if line.startswith(" "):
            quantity, unit, meaning = line.strip().split(" | ")
            yield Key(f"{stage}/{quantity}", unit, meaning, is_frozen=bool(frozen))
        else:
            stage, _, frozen = line.partition(", ")


KEYS = tuple(_read(_TABLE))
FROZEN_KEYS = tuple(key.key for key in KEYS if key.is_frozen)

TRAINED_TOKENS, RUN_TIME = "throughput/trained_tokens_total", "time/run_s"  # axes of charts
FIRST_LOOK = (  # what a dashboard shows first
    *("reward/mean", "eval/*/avg_at_k", "rollout/response_tokens_mean"),
    *("rollout/generated_tokens_per_s", "staleness/off_policy_token_frac"),
    *("mismatch/logprob_abs_mean", "loss/entropy", "time/step_s"),
)

_FORM = re.compile(r"[a-z][a-z0-9_]*(/[A-Za-z0-9_.\-]+)+")
_STAGES = tuple(dict.fromkeys(key.stage for key in KEYS))


def check(key: str) -> None:
    """Raise ValueError unless `key` has the form `stage/quantity`."""
    if not _FORM.fullmatch(key):
        raise ValueError(
            f"metric key {key!r} must have the form stage/quantity, such as reward/mean"
        )


def sort_key(key: str) -> tuple[int, str]:
    """Order keys by stage, as the table lists them, unknown stages last; then by name."""
    stage = key.partition("/")[0]
    return (_STAGES.index(stage) if stage in _STAGES else len(_STAGES), key)
