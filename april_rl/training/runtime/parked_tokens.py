"""Tokens of parked samples, which a worker keeps, so that they are not sent to it again."""

from __future__ import annotations

from april_rl.training.rollout.requests import Parts, Requests
from april_rl.training.rollout.ticks import Completions
from april_rl.types import SampleId


class ParkedTokens:
    """The samples that an engine gave back unfinished in its last abort that had any.

    Controller and worker have one each for an engine and record the same events, so both know the
    same tokens. The controller leaves out only tokens that equal those, and the worker adds them.
    """

    def __init__(self) -> None:
        self._sent: dict[SampleId, Parts] = {}  # since the last abort
        self._parked: dict[SampleId, Parts] = {}

    def omit(self, requests: Requests) -> Requests:
        """Return the requests without the tokens that the worker has."""
        samples = list(zip(requests.sample_ids, requests.parts, strict=True))
        self._sent |= samples
        known = [bool(parts) and self._parked.get(each) == parts for each, parts in samples]
        left = [
            () if is_known else parts for is_known, (_, parts) in zip(known, samples, strict=True)
        ]
        return requests._replace(parts=left, is_known=known)

    def complete(self, requests: Requests) -> Requests:
        """Return the requests with the tokens that `omit` has left out."""
        known = requests.is_known or [False] * len(requests.parts)
        samples = zip(requests.sample_ids, known, requests.parts, strict=True)
        parts = [self._parked[each] if is_known else sent for each, is_known, sent in samples]
        self._sent |= zip(requests.sample_ids, parts, strict=True)
        return requests._replace(parts=parts, is_known=())

    def park(self, given_back: Completions) -> None:
        """Record what an abort gave back; after an evaluation that is nothing."""
        parked: dict[SampleId, Parts] = {}
        for sample in given_back:
            if sample.finish_reason is None:
                new = (sample.token_ids,) if sample.token_ids else ()
                parked[sample.sample_id] = self._sent[sample.sample_id] + new
        self._parked, self._sent = parked or self._parked, {}
