"""TRL's prompts, and the rewards that it computes later, as ports of the collector."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from april_rl.types import Prompt, Sample, Score

_ROW = "row"


class Rows:
    """Prompts of this process in the order of TRL's sampler, ahead of its data loader."""

    def __init__(self, trainer: GRPOTrainer, *, num_groups: int, num_taken: int = 0) -> None:
        """A batch has `num_groups` prompts in each process; `num_taken` were taken before."""
        self._trainer, self._num_groups = trainer, num_groups
        self._indices = self._endless()
        for _ in range(num_taken):
            next(self._indices)
        self.num_taken = num_taken

    def take(self) -> Prompt:
        """Return the next prompt."""
        index = next(self._indices)
        row = self._trainer.train_dataset[index]
        token_ids = self._trainer._tokenize_prompts([row["prompt"]])[0][0]
        self.num_taken += 1
        return Prompt(
            id=self.num_taken - 1,
            token_ids=tuple(token_ids),
            text="",
            answer="",
            source=f"train_dataset:{index}",
            columns={_ROW: index},
        )

    def of(self, sample: Sample) -> dict[str, Any]:
        """Return the data set's row of a sample."""
        row: dict[str, Any] = self._trainer.train_dataset[sample.prompt.columns[_ROW]]
        return row

    def _endless(self) -> Iterator[int]:
        """Yield the prompts that TRL's sampler draws for this process, without its repetitions."""
        trainer = self._trainer
        of_batch = self._num_groups * trainer.accelerator.num_processes
        first = self._num_groups * trainer.accelerator.process_index
        sampler = RepeatSampler(
            data_source=trainer.train_dataset,
            mini_repeat_count=1,
            batch_size=of_batch,
            shuffle=trainer.shuffle_dataset,
            seed=trainer.args.seed,
        )
        while True:
            indices = list(sampler)  # one epoch
            for start in range(first, len(indices), of_batch):
                yield from indices[start : start + self._num_groups]


class NoRewards:
    """TRL rewards whole batches; here every sample has a reward at once, so groups are ready."""

    def __init__(self) -> None:
        """Begin without samples."""
        self._scores: deque[Score] = deque()

    def submit(self, sample: Sample, *, group_size: int) -> None:  # noqa: ARG002
        """Give the sample a reward of 0."""
        self._scores.append(Score(sample_id=sample.id, value=0.0, outcome="scored"))

    def act(self, sample: Sample) -> None:
        """Raise NotImplementedError: no prompt has an environment."""
        raise NotImplementedError(sample.id)

    def collect(self, timeout_s: float | None, look: object = None) -> Sequence[Score]:  # noqa: ARG002
        """Return the rewards that were not returned yet."""
        scores = list(self._scores)
        self._scores.clear()
        return scores
