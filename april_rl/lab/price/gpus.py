"""The GPUs among which a plan chooses, and their prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from april_rl.errors import RunError
from april_rl.lab.price.assumptions import positive
from april_rl.lab.simulator.gpu_kinds import GPU_KINDS, GpuKind

GPUS, PRICE = "gpus=", "price."


@dataclass(frozen=True, slots=True)
class Gpus:
    """A number of GPUs of one kind."""

    kind: GpuKind
    count: int
    price: float | None = None  # of a GPU for an hour

    @property
    def name(self) -> str:
        return f"{self.count} x {self.kind.title}"


def gpus_among(arguments: Sequence[str]) -> tuple[list[Gpus], list[str]]:
    """Return the GPUs of `gpus=h100:1,2,l40s:4` with their prices (`price.h100=2.5`), and the other
    arguments. Raise RunError for an unknown GPU, or a number that is not above 0.
    """
    prices = {}
    for word in (word for word in arguments if word.startswith(PRICE)):
        key, _, text = word.partition("=")
        prices[_kind(word, key.removeprefix(PRICE))] = positive(key, text)
    found = []
    for listed in (word for word in arguments if word.startswith(GPUS)):
        name = ""
        for part in listed.removeprefix(GPUS).split(","):
            kind, colon, number = part.rpartition(":")
            name = kind if colon else name
            gpu = _kind(listed, name)
            if not number.isdigit() or int(number) < 1:
                raise RunError(f"{listed}: {part} must be KIND:NUMBER, as in h100:8")
            found.append(Gpus(gpu, int(number), prices.get(gpu)))
    return found, [word for word in arguments if not word.startswith((GPUS, PRICE))]


def _kind(word: str, name: str) -> GpuKind:
    if name not in GPU_KINDS:
        raise RunError(f"{word}: {name or 'that'} is none of {', '.join(GPU_KINDS)}")
    return GPU_KINDS[name]
