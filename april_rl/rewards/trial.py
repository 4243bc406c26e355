"""Calls reward functions on responses given as text: before training, and in commands."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from pebble import ProcessExpired

from april_rl.config.task import RewardConfig
from april_rl.rewards.functions import RewardFunction, reward_functions
from april_rl.rewards.jobs import Responses, RewardPrompt, Verdict
from april_rl.rewards.processes import RewardError, fault, new_process_pool, stop
from april_rl.rewards.worker import Decode, function_notes, needed_columns, score_texts
from april_rl.types import Prompt

_CHARACTERS_PER_TOKEN = 4  # typical of English, for functions of the length

_Answer = TypeVar("_Answer")


class RewardTrial:
    """A separate reward process that calls the functions of a run, for use as a context manager.

    Every method raises RewardError when a function cannot be loaded or is at fault, when the
    decoder cannot be loaded, and when the process dies or does not answer in time.
    """

    def __init__(
        self,
        reward: RewardConfig,
        *,
        decode: Decode,
        folder: Path | None = None,
    ) -> None:
        """`decode` is the one that a run would use; `folder` is the run directory, None outside a
        run.
        """
        self._functions, self._limit_s = reward_functions(reward), reward.hard_timeout_s
        self._start_s = reward.start_timeout_s
        self._pool = new_process_pool(
            reward, decoder=pickle.dumps(decode), folder=folder, num_processes=1
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the data columns that the functions take besides prompt and answer."""
        return self._needed_by(self._functions)

    def columns_of(self, dataset: str) -> tuple[str, ...]:
        """Return the data columns that the functions for that data set take."""
        return self._needed_by([f for f in self._functions if f.scores(dataset)])

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on the functions for the user, for example which sandbox is used."""
        return self._ask_or_raise(function_notes)

    def rate(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float | None]:
        """Return the reward of each response to the prompt at the same position; None for no score.
        Each response is its own group.
        """
        verdicts = [
            self.verdicts(prompt, [response])[0]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        return [self._total(of_one) for of_one in verdicts]

    def verdicts(self, prompt: Prompt, responses: Sequence[str]) -> list[list[Verdict]]:
        """Return the verdict of each function on each response to a prompt; the responses form one
        group [n].

        Lengths in tokens are estimated as a fourth of the lengths in characters.
        """
        job = Responses(
            prompt=RewardPrompt.of(prompt),
            texts=tuple(responses),
            num_tokens=[1 + len(text) // _CHARACTERS_PER_TOKEN for text in responses],
            truncated=[False] * len(responses),
        )
        limit_s = self._start_s + self._limit_s * len(responses)
        found = self._ask(score_texts, (job,), limit_s=limit_s)
        for verdict in (verdict for of_one in found for verdict in of_one):
            if verdict.outcome in ("refused", "undecoded"):
                raise fault(self._functions, verdict)
        return found

    def _total(self, verdicts: Sequence[Verdict]) -> float | None:
        weights = {function.name: function.weight for function in self._functions}
        values = [weights[v.name] * v.value for v in verdicts if v.value is not None]
        return sum(values) if len(values) == len(verdicts) else None

    def _needed_by(self, functions: Sequence[RewardFunction]) -> tuple[str, ...]:
        by_name = self._ask_or_raise(needed_columns)
        asked = chain.from_iterable(by_name[function.name] for function in functions)
        return tuple(dict.fromkeys(asked))

    def _ask_or_raise(self, question: Callable[[], _Answer | Verdict]) -> _Answer:
        found = self._ask(question, (), limit_s=self._start_s)
        if isinstance(found, Verdict):
            raise fault(self._functions, found)
        return found

    def _ask(
        self, question: Callable[..., _Answer], args: tuple[object, ...], *, limit_s: float
    ) -> _Answer:
        future = self._pool.schedule(question, args=args, timeout=limit_s)
        try:
            # The pool's own limit does not include the start of a process.
            answer: _Answer = future.result(timeout=limit_s)
        except (TimeoutError, ProcessExpired, BrokenProcessPool) as error:
            raise RewardError(
                f"{' and '.join(map(str, self._functions))}: called once as a test, the process "
                f"died or did not answer within {limit_s:g} s, of which it may take "
                f"reward.start_timeout_s={self._start_s:g} to start: {error}"
            ) from error
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        stop(self._pool)
