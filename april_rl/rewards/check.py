"""The test of the reward function before training starts."""

from __future__ import annotations

import pickle
from concurrent.futures.process import BrokenProcessPool

from pebble import ProcessExpired

from april_rl.rewards.processes import START_S, RewardError, fault, new_process_pool, stop
from april_rl.rewards.worker import Decode, DecodedJob, try_out


def check_reward(
    function: str,
    *,
    soft_timeout_s: float,
    hard_timeout_s: float,
    memory_gib: float,
    decode: Decode,
    prompt: str = "What is 1 + 1?",
    answer: str = "2",
    start_s: float = START_S,
) -> float:
    """What the function gives for the answer in a box, called once in a process of its own; raises
    RewardError when that fails, or when `decode` cannot be loaded there.

    A function that needs answers of some form should get a prompt and an answer of the data set
    here.
    """
    job = DecodedJob(prompt=prompt, response=f"It is \\boxed{{{answer}}}.", answer=answer)
    pool = new_process_pool(
        function,
        num_processes=1,
        soft_timeout_s=soft_timeout_s,
        memory_gib=memory_gib,
        decoder=pickle.dumps(decode),
    )
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
