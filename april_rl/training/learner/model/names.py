"""Names that parameters have on disk and in the engine, where every expert has its own tensors.

Legend: [E] experts, [I] their width, [H] hidden size. transformers stacks the experts of a layer in
`gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I]. A published checkpoint has, for each expert,
`gate_proj` and `up_proj` [I, H] and `down_proj` [H, I]. transformers describes this mapping and
converts whole models; this module turns the description into boxes, so that a rank can read the
slices of its shard and send one parameter after another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Size, Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from april_rl.errors import RunError

Box = tuple[slice, ...]  # one range per dimension


class UnknownLayoutError(RunError):
    """The checkpoint in model.path has a layout of parameters that the learner cannot read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor on disk and its position in a parameter."""

    name: str  # on disk
    box: Box  # in the parameter
    is_expert: bool  # the box is one expert, and the tensor has no expert dimension

    @property
    def shape(self) -> Size:
        sizes = [along.stop - along.start for along in self.box]
        return Size(sizes[1:] if self.is_expert else sizes)

    def of(self, whole: Tensor) -> Tensor:
        """Return the tensor as a view of the whole parameter."""
        view = whole[self.box]
        return view[0] if self.is_expert else view


@dataclass(frozen=True, slots=True)
class TextPrefixes:
    """How the names of the backbone and of the output layer begin on disk."""

    model: str = "model."
    lm_head: str = "lm_head."

    @classmethod
    def among(cls, names: Iterable[str]) -> TextPrefixes:
        """Return the prefixes of the text model in a checkpoint with these tensor names."""
        listed = list(names)
        found = (form for form in _FORMS if any(name.startswith(form.model) for name in listed))
        return next(found, cls())

    def add_prefix(self, name: str) -> str:
        """Return the name on disk of a tensor of the text model."""
        for own, prefix in ((_PLAIN.model, self.model), (_PLAIN.lm_head, self.lm_head)):
            if name.startswith(own):
                return prefix + name.removeprefix(own)
        return name


_PLAIN = TextPrefixes()
# Prefixes in multimodal checkpoints: as transformers 5 writes them, and as Gemma 3 was published.
_FORMS = (
    TextPrefixes("model.language_model."),
    TextPrefixes("language_model.model.", "language_model.lm_head."),
)


class StoredNames:
    """Mapping from a model's parameters to the tensors in its checkpoints."""

    def __init__(self, causal_lm: PreTrainedModel, prefixes: TextPrefixes = _PLAIN) -> None:
        """Take the mapping from transformers; `prefixes` belong to the checkpoint."""
        self._prefixes = prefixes
        conversions = [
            conversion.reverse_transform()
            for conversion in reversed(get_model_conversion_mapping(causal_lm, add_legacy=False))
            if not isinstance(conversion, PrefixChange)  # it renames parts of another model
        ]
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._splits = [c for c in conversions if isinstance(c, WeightConverter)]

    def stored_parts(self, name: str, shape: Size) -> tuple[Part, ...]:
        """Return the tensors on disk that make up the parameter `name`, expert after expert.

        Raises UnknownLayoutError unless the parameter is stored as one tensor, as several tensors
        with some of its rows each, or as such tensors for each expert.
        """
        stored, pattern = rename_source_key(name, self._renamings, self._splits, reverse=True)
        stored = self._prefixes.add_prefix(stored)
        if pattern is None:
            return (Part(name=stored, box=_whole(shape), is_expert=False),)
        split = next(s for s in self._splits if pattern in s.source_patterns)
        _check_layout(name, split)
        first, *others = split.target_patterns
        projections = [stored, *(stored.replace(first, other, 1) for other in others)]
        return tuple((_experts if "*" in stored else _rows)(projections, shape))


def untrained_names(causal_lm: PreTrainedModel, prefixes: TextPrefixes) -> list[str]:
    """Return regular expressions for the names of tensors that are in its checkpoints but not in
    the model: layers that predict several tokens, and everything outside the text model.
    """
    ignored = [*(causal_lm._keys_to_ignore_on_load_unexpected or ())]
    if prefixes != _PLAIN:
        ignored.append(f"^(?!{re.escape(prefixes.model)}|{re.escape(prefixes.lm_head)})")
    return ignored


def cut(whole: Tensor, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
    """Yield name on disk and tensor of every part; the tensors are views of `whole`."""
    for part in parts:
        yield part.name, part.of(whole)


def _whole(shape: Size) -> Box:
    return tuple(slice(0, size) for size in shape)


def _experts(projections: Sequence[str], shape: Size) -> Iterator[Part]:
    """Yield the parts of a parameter [E, R, .], each R / len(projections) rows of an expert.

    `projections` are names with a star in place of the expert's number.
    """
    num_experts, num_rows = shape[:2]
    rows = num_rows // len(projections)
    for expert in range(num_experts):
        for i, projection in enumerate(projections):
            of_expert = (slice(expert, expert + 1), slice(i * rows, (i + 1) * rows))
            yield Part(
                name=projection.replace("*", str(expert), 1),
                box=(*of_expert, *_whole(shape[2:])),
                is_expert=True,
            )


def _rows(names: Sequence[str], shape: Size) -> Iterator[Part]:
    """Yield the parts of a parameter [R, .], each R / len(names) rows."""
    rows = shape[0] // len(names)
    for i, name in enumerate(names):
        box = (slice(i * rows, (i + 1) * rows), *_whole(shape[1:]))
        yield Part(name=name, box=box, is_expert=False)


def _check_layout(name: str, split: WeightConverter) -> None:
    """Raise UnknownLayoutError unless `split` only separates experts, and then their rows, or the
    rows of a parameter.
    """
    match split.operations:
        case [SplitModulelist(dim=0)] if len(split.target_patterns) == 1:
            return
        case [Chunk(dim=1, num_shards_attribute=None), SplitModulelist(dim=0)]:
            return
        case [Chunk(dim=0, num_shards_attribute=None)]:
            return
    raise UnknownLayoutError(
        f"model.path: checkpoints of this model have {', '.join(split.target_patterns)} where the "
        f"learner has {name}, related by {split.operations}; the learner only reads checkpoints "
        "whose tensors are its parameters or the matrices of single experts. Use another model"
    )
