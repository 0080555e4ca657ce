"""Changes made to a live model's weights outside the Weaver, between two stacks.

a tensor without adapters      its present numbers are the base
moved or converted             recognized, since it holds what was written, rounded as conversions round; its original
                               is moved and converted too
loaded with its original       without adapters from now on
any other numbers              refused by name
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import torch

from inweave.errors import MergeStateError
from inweave.weights.live import LiveModel, Mark
from inweave.weights.pristine import same_bits
from inweave.weights.stack import Item, TensorKey
from inweave.weights.stack_state import StackState, owners_of
from inweave.weights.writer import Writer

_NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
#: dtypes that a model may have been converted to before the one it has now
_DETOURS: tuple[tuple[torch.dtype, ...], ...] = tuple(
    path for count in range(3) for path in permutations(_NARROW, count)
)

ItemsOf = Callable[[], Mapping[TensorKey, Sequence[Item]]]


class Outside(NamedTuple):
    """What was found: the state of the weights now, tensors that are not known any more, and whether any was moved."""

    state: StackState
    foreign: list[TensorKey]
    moved: bool


def follow(live: LiveModel, writer: Writer, state: StackState, items_of: ItemsOf) -> Outside:
    """Follow changes to weights that were written before."""
    woven, uncertain, marks = state.changed(), state.uncertain, writer.marks
    moved, dropped = dict[TensorKey, Mark](), list[TensorKey]()
    for key, mark in marks.items():
        if key not in live.slots:
            if key in woven:
                live.refuse_remains(key, mark)
            dropped.append(key)  # its module is gone, and the weight with it
        elif key in uncertain:
            writer.pristine[key[0]].convert(key[1], writer.tensor(key))
        elif key in woven:
            if (mark[0][2] == torch.uint8) != (key in live.layers):
                live.refuse_quantized([key])
            if mark != live.home(key).mark():
                moved[key] = mark
        elif not live.is_at(key, mark):
            dropped.append(key)
    rounded, foreign = list[TensorKey](), list[TensorKey]()
    items, owners = (items_of(), owners_of(state.stack)) if moved else ({}, {})
    path: tuple[torch.dtype, ...] | None = ()
    for key, ((_, _, dtype, device), _) in moved.items():
        home, pristine = live.home(key), writer.pristine[key[0]]
        before = torch.empty(home.tensor.shape, dtype=dtype, device=device)
        detour = _detour(writer.rebuilt(key, items[key], owners, before), home.tensor, path or ())
        if detour is not None:
            path = detour
            pristine.convert(key[1], home.tensor)
            marks.set(key, home.mark())
            if path or home.tensor.dtype != dtype:  # rounded twice: the next stack writes it again
                rounded.append(key)
        elif same_bits(pristine.get(key[1], before).to(home.tensor), home.tensor):
            dropped.append(key)
        else:
            foreign.append(key)
    writer.forget(dropped)
    state = state.without(dropped) if dropped and woven else state
    return Outside(state.during(rounded), foreign, bool(moved or dropped))


def restorable(live: LiveModel, writer: Writer, state: StackState) -> list[TensorKey]:
    """Return the tensors whose originals can be written back, whatever they hold; everything else is forgotten."""
    woven, present, gone = state.changed(), list[TensorKey](), list[TensorKey]()
    for key, mark in writer.marks.items():
        if key in woven and key not in live.slots:
            live.refuse_remains(key, mark)
        if not (key in live.slots and (writer.convert(key) if key in woven else live.is_at(key, mark))):
            gone.append(key)
        elif key in woven:
            present.append(key)
    writer.forget(gone)
    return present


def refuse_foreign(foreign: Sequence[TensorKey]) -> None:
    """Raise if weights with adapters hold other numbers than were written."""
    if foreign:
        more = f" and {len(foreign) - 1} more tensors" if len(foreign) > 1 else ""
        raise MergeStateError(
            f"{foreign[0][1]}{more}: modified outside the Weaver while adapters were merged; restore() puts the "
            "original weights back, and the modification is lost; call apply([]) before changing weights"
        )


def _detour(
    written: torch.Tensor, present: torch.Tensor, likely: tuple[torch.dtype, ...]
) -> tuple[torch.dtype, ...] | None:
    """Return the dtypes through which what was written became what is there, the shortest; None if it did not."""
    for path in ((), likely, *_DETOURS):
        value = written
        for dtype in path:
            value = value.to(dtype)
        if same_bits(value.to(present), present):
            return path
    return None
