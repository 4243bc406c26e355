"""Every prompt ever opened is in exactly one state, and the sums are checked every step."""

from __future__ import annotations

from collections import Counter
from enum import Enum

from april_rl.metrics import Metrics, Sum
from april_rl.rollout.codec import Plain


class State(Enum):
    """The state of a prompt. The first three are live, the others final."""

    in_flight = "in_flight"  # being generated or scored in this step
    parked = "parked"  # outlived its step: unfinished, or finished and not yet scored
    ready = "ready"  # complete and scored, waiting to be trained
    trained = "trained"
    rejected = "rejected"  # no signal
    dropped = "dropped"  # a reward or an engine failed; counted by reason

    # The hash of Enum is a Python function, and every event of a group looks up states.
    __hash__ = object.__hash__


_MOVES = {
    State.in_flight: {State.parked, State.ready, State.rejected, State.dropped},
    State.parked: {State.in_flight, State.ready, State.rejected, State.dropped},
    State.ready: {State.trained},
}


class LedgerError(AssertionError):
    """A prompt was lost, counted twice, or moved in an illegal way."""


class Ledger:
    """The state of every prompt. Only live prompts are kept by id; final ones are counted."""

    def __init__(self) -> None:
        """Start empty."""
        self._live: dict[int, State] = {}
        self._final: Counter[State] = Counter()
        self._drop_reasons: Counter[str] = Counter()
        self._opened = 0

    def open(self, prompt_id: int) -> None:
        """Add a new prompt in flight; raise LedgerError if it is live already."""
        if prompt_id in self._live:
            raise LedgerError(f"prompt {prompt_id} was opened twice")
        self._live[prompt_id] = State.in_flight
        self._opened += 1

    def move(self, prompt_id: int, to: State, *, reason: str = "") -> None:
        """Record a transition, with a `reason` for `dropped`; raise LedgerError for an
        illegal one.
        """
        now = self._live.get(prompt_id)
        if now is None or to not in _MOVES[now]:
            raise LedgerError(
                f"prompt {prompt_id} cannot go from {now and now.value} to {to.value}"
            )
        if to in _MOVES:
            self._live[prompt_id] = to
            return
        del self._live[prompt_id]
        self._final[to] += 1
        if to is State.dropped:
            self._drop_reasons[reason] += 1

    def move_all(self, now: State, *, to: State) -> None:
        """Move every prompt from the live state `now` to the live state `to`."""
        assert to in _MOVES
        assert to in _MOVES[now], (now, to)
        for prompt_id, state in self._live.items():
            if state is now:
                self._live[prompt_id] = to

    def state(self, prompt_id: int) -> State | None:
        """Return the state of a live prompt; None when it is final or was never opened."""
        return self._live.get(prompt_id)

    def count(self, state: State) -> int:
        """Return how many prompts are in `state`."""
        return self.counts()[state] if state in _MOVES else self._final[state]

    def counts(self) -> Counter[State]:
        """Return how many prompts are in each state."""
        return Counter(self._live.values()) + self._final

    @property
    def opened(self) -> int:
        """Return how many prompts were ever opened."""
        return self._opened

    @property
    def drop_reasons(self) -> dict[str, int]:
        """Return how often groups were dropped, by reason."""
        return dict(self._drop_reasons)

    def check(self, *, parked: int, ready: int) -> None:
        """Raise LedgerError unless the states add up to the opened prompts and agree with the
        buffer.
        """
        counts = self.counts()
        total = counts.total()
        if total != self._opened:
            raise LedgerError(f"{self._opened} prompts were opened, but {total} are accounted for")
        for state, held in ((State.parked, parked), (State.ready, ready)):
            if counts[state] != held:
                raise LedgerError(
                    f"{counts[state]} prompts are {state.value} in the ledger, {held} in the buffer"
                )

    def save(self) -> Plain:
        """Return ids of live prompts by state, counts of final ones and drop reasons; only between
        steps.
        """
        live: dict[str, list[int]] = {state.value: [] for state in _MOVES}
        for prompt_id, state in sorted(self._live.items()):
            live[state.value].append(prompt_id)
        assert not live[State.in_flight.value], "a ledger is saved between steps"
        return {
            "opened": self._opened,
            "live": live,
            "final": {state.value: self._final[state] for state in State if state not in _MOVES},
            "drop_reasons": self.drop_reasons,
        }

    def restore(self, state: Plain) -> None:
        """Replace everything by what was saved."""
        self._opened = state["opened"]
        self._live = {id_: State(name) for name, ids in state["live"].items() for id_ in ids}
        self._final = Counter({State(name): count for name, count in state["final"].items()})
        self._drop_reasons = Counter(state["drop_reasons"])

    def metrics(self) -> Metrics:
        """Return `ledger/*`: the count of every state, and of all opened prompts."""
        counts = self.counts()
        of_states = {f"ledger/{state.value}": Sum(counts[state]) for state in State}
        return Metrics({"ledger/opened": Sum(self._opened), **of_states})
