"""The test of the reward function before training starts."""

from __future__ import annotations

import pickle
from concurrent.futures.process import BrokenProcessPool

from pebble import ProcessExpired

from april_rl.config.choices import Extract
from april_rl.config.task import RewardConfig
from april_rl.rewards.extraction import gold_answer
from april_rl.rewards.processes import START_S, RewardError, fault, new_process_pool, stop
from april_rl.rewards.worker import Decode, DecodedJob, try_out


def check_reward(
    reward: RewardConfig,
    *,
    decode: Decode,
    prompt: str = "What is 1 + 1?",
    answer: str = "2",
    start_s: float = START_S,
) -> float:
    """Return what the function gives for the answer in the form that `reward.extract` reads, called
    once in a process of its own. Raises RewardError when that fails, or when `decode` cannot be
    loaded there.

    A function that needs answers of some form should get a prompt and an answer of the data set
    here.
    """
    function, hard_timeout_s = reward.function, reward.hard_timeout_s
    job = DecodedJob(prompt=prompt, response=gold_response(answer, reward.extract), answer=answer)
    pool = new_process_pool(reward, decoder=pickle.dumps(decode), num_processes=1)
    try:
        future = pool.schedule(try_out, args=([job, job],), timeout=start_s + hard_timeout_s)
        verdict = future.result()[0]
    except (TimeoutError, ProcessExpired, BrokenProcessPool) as error:
        raise RewardError(
            f"reward.function={function}: called once as a test, its process died or gave no "
            f"answer within {start_s + hard_timeout_s:.0f} s: {error}"
        ) from error
    finally:
        stop(pool)
    if verdict.outcome == "raised":
        raise RewardError(
            f"reward.function={function} raised when called once as a test: {verdict.message}"
        )
    if verdict.outcome in ("refused", "undecoded"):
        raise fault(function, verdict)
    return verdict.value


def gold_response(answer: str, how: Extract) -> str:
    """Return a response that states the data set's answer in the form that `how` reads."""
    answer = gold_answer(answer)
    if how is Extract.answer_line:
        return f"It follows.\nAnswer: {answer}"
    if how is Extract.last_number:
        return f"It is {answer}."
    return f"It is \\boxed{{{answer}}}."
