"""A sentry on every node that has workers: in this process for those of this machine, an actor on
each other one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from april_rl.runtime.pulse import Activity, Member
from april_rl.runtime.sentry import UNSEEN, Findings, Machine, Sentry, Vitals

_NODE_ANSWERS_S = 5.0
_NOT_YET = Vitals(state=UNSEEN, rss_bytes=0, activity=Activity())
_NO_FINDINGS = Findings(stacks="no stacks: the node does not answer\n", log_tail="")
_NO_MACHINE = Machine(total_bytes=0, free_bytes=0, oom_kills=0)


class Sentries:
    """All of them, as one that knows every worker by its rank."""

    def __init__(self, members: Sequence[Member]) -> None:
        """`members` by rank."""
        self.members = tuple(members)
        here = ray.get_runtime_context().get_node_id() if members else ""
        self._last = [_NOT_YET] * len(members)
        ranks: dict[str, list[int]] = {}
        for rank, member in enumerate(members):
            ranks.setdefault(member.node_id, []).append(rank)
        self._here = ranks.pop(here, [])
        self._sentry = Sentry([members[rank] for rank in self._here])
        self._there = [_There(node, [(r, members[r]) for r in of]) for node, of in ranks.items()]

    def look(self) -> list[Vitals]:
        """Of every worker, by rank; of another node's what its sentry said last, and that it is
        not seen when that is too long ago. Never waits.
        """
        for rank, vitals in zip(self._here, self._sentry.look(), strict=True):
            self._last[rank] = vitals
        for there in self._there:
            for rank, vitals in there.look():
                self._last[rank] = vitals
            for rank in there.ranks if there.is_silent else ():
                self._last[rank] = replace(self._last[rank], state=UNSEEN)
        return list(self._last)

    def findings(self, wait_s: float) -> list[Findings]:
        """Of every worker, by rank, within `wait_s` and what a node may take to answer."""
        found = [_NO_FINDINGS] * len(self.members)
        calls = [there.ask("findings", wait_s) for there in self._there]
        for rank, findings in zip(self._here, self._sentry.findings(wait_s), strict=True):
            found[rank] = findings
        for there, call in zip(self._there, calls, strict=True):
            answer = there.answer(call, [_NO_FINDINGS] * len(there.ranks), wait_s)
            for rank, findings in zip(there.ranks, answer, strict=True):
                found[rank] = findings
        return found

    def machines(self) -> list[Machine]:
        """Of every worker, by rank: the memory of its node."""
        found = [self._sentry.machine()] * len(self.members)
        calls = [there.ask("machine") for there in self._there]
        for there, call in zip(self._there, calls, strict=True):
            machine = there.answer(call, _NO_MACHINE, 0.0)
            for rank in there.ranks:
                found[rank] = machine
        return found

    def mark(self) -> None:
        """Before the workers are told to go: note what `end` is to end."""
        calls = [there.ask("mark") for there in self._there]
        self._sentry.mark()
        for there, call in zip(self._there, calls, strict=True):
            there.answer(call, None, 0.0)

    def end(self) -> None:
        """SIGKILL to every worker that does not go, and to its children."""
        calls = [there.ask("end") for there in self._there]
        self._sentry.end()
        for there, call in zip(self._there, calls, strict=True):
            there.answer(call, None, 0.0)
            there.end()


class _There:
    """The sentry of another node, which may be slow to answer or gone."""

    def __init__(self, node_id: str, ranked: Sequence[tuple[int, Member]]) -> None:
        self.ranks = [rank for rank, _ in ranked]
        # Without one its workers would seem silent, whatever they do.
        actor = ray.remote(Sentry).options(
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        self._actor: Any = actor.remote([member for _, member in ranked])
        self.is_silent = False  # it does not answer
        self._ask_again()

    def look(self) -> list[tuple[int, Vitals]]:
        """By rank, when the last question has been answered; it is asked again then."""
        if not ray.wait([self._asked], timeout=0)[0]:
            self.is_silent = time.monotonic() - self._asked_at > _NODE_ANSWERS_S
            return []
        vitals: list[Vitals] = self.answer(self._asked, [], 0.0)
        self.is_silent = not vitals
        self._ask_again()
        return list(zip(self.ranks, vitals, strict=False))

    def _ask_again(self) -> None:
        self._asked, self._asked_at = self.ask("look"), time.monotonic()

    def ask(self, method: str, *args: object) -> ray.ObjectRef[Any]:
        call: ray.ObjectRef[Any] = getattr(self._actor, method).remote(*args)
        return call

    def answer(self, call: ray.ObjectRef[Any], otherwise: Any, wait_s: float) -> Any:  # noqa: ANN401
        """What came of `call`, or `otherwise` when the node is silent or gone."""
        until = time.monotonic() + wait_s + _NODE_ANSWERS_S
        try:
            return ray.get(call, timeout=max(0.0, until - time.monotonic()))
        except RayError:
            return otherwise

    def end(self) -> None:
        ray.kill(self._actor, no_restart=True)
