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

from april_rl.runtime.supervision.heartbeat import Activity, Member
from april_rl.runtime.supervision.node_monitor import UNSEEN, Findings, Machine, Sentry, Vitals

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
        for there, answer in zip(self._there, _answers(calls, wait_s), strict=True):
            of_node = answer or [_NO_FINDINGS] * len(there.ranks)
            for rank, findings in zip(there.ranks, of_node, strict=True):
                found[rank] = findings
        return found

    def machines(self) -> list[Machine]:
        """Of every worker, by rank: the memory of its node."""
        found = [self._sentry.machine()] * len(self.members)
        calls = [there.ask("machine") for there in self._there]
        for there, machine in zip(self._there, _answers(calls), strict=True):
            for rank in there.ranks:
                found[rank] = machine or _NO_MACHINE
        return found

    def mark(self) -> None:
        """Before the workers are told to go: note what `end` is to end."""
        calls = [there.ask("mark") for there in self._reachable()]
        self._sentry.mark()
        _answers(calls)

    def end(self) -> None:
        """SIGKILL to every worker that does not go, and to its children."""
        calls = [there.ask("end") for there in self._reachable()]
        self._sentry.end()
        _answers(calls)
        for there in self._reachable():
            there.end()

    def _reachable(self) -> list[_There]:
        """Those of other nodes; none when Ray has been left: asking them would start it anew."""
        return self._there if ray.is_initialized() else []


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
        vitals: list[Vitals] = _answer(self._asked) or []
        self.is_silent = not vitals
        self._ask_again()
        return list(zip(self.ranks, vitals, strict=False))

    def _ask_again(self) -> None:
        self._asked, self._asked_at = self.ask("look"), time.monotonic()

    def ask(self, method: str, *args: object) -> ray.ObjectRef[Any]:
        call: ray.ObjectRef[Any] = getattr(self._actor, method).remote(*args)
        return call

    def end(self) -> None:
        ray.kill(self._actor, no_restart=True)


def _answers(calls: Sequence[ray.ObjectRef[Any]], wait_s: float = 0.0) -> list[Any]:
    """What came of each call; None where the node is silent or gone. They all have the same
    `wait_s` and what a node may take: a cluster of which much is gone is not waited for in turn.
    """
    if calls:
        ray.wait(list(calls), num_returns=len(calls), timeout=wait_s + _NODE_ANSWERS_S)
    return [_answer(call) for call in calls]


def _answer(call: ray.ObjectRef[Any]) -> Any:  # noqa: ANN401
    """What has come of a call by now; None when nothing has, or it failed."""
    try:
        return ray.get(call, timeout=0)
    except RayError:
        return None
