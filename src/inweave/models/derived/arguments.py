"""What each argument of a denoiser's call depends on, and how rows of a batch are joined.

    kind   constant   the same in every call            rows   joined   one row after another, padded to the longest
           text       changes with the prompt                  listed   a list with an entry for every row
           size       changes with the image's size            shared   one value for all: that of the longest text
           guidance   the strength of guidance             masked   nothing for one length, else a mask of the padding

    alike      one row after another, and only of one length: padding goes through the text encoder, so a row in a batch
               with a longer one is another row

An argument that depends on the text and the size at once, or that a batch changes in any other way, is refused by name.
Text of a row is kept as one tensor with its row as the first axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from inweave.errors import ConfigError, FormatError

Kind = Literal["constant", "text", "size", "guidance"]
Rows = Literal["joined", "listed", "shared", "masked", "alike"]
#: the states of a text encoder depend on how many rows it has: a matrix product rounds otherwise
ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: what it depends on; ``side`` and ``fill``: where rows are padded and with what."""

    kind: Kind
    rows: Rows
    side: Literal["left", "right"] = "right"
    fill: float = 0.0
    value: Any = None  # of a constant; of guidance its factor
    of: str = ""  # the text that a mask is for
    dtype: torch.dtype | None = None  # of a mask
    axis: int = 0  # that of the rows
    grows: float | None = None  # of a text that has one such number for each token of the image after it
    length: int = 0  # with them, at the size at which texts are recorded

    def grown(self, value: Tensor, length: int) -> Tensor:
        """Return a value of the recorded size for another, at which the first text has this ``length``."""
        more = length - self.length
        if more <= 0:
            return value[:, : value.shape[1] + more]
        return torch.cat([value, value.new_full((len(value), more, *value.shape[2:]), self.grows or 0.0)], 1)

    def join(self, values: Sequence[Any]) -> Any:
        """Return the values of several rows as a batch."""
        if self.rows == "listed":
            return [each for value in values for each in value]
        if self.rows == "shared":
            return max(values, key=_length)
        if self.axis:
            return torch.cat(list(values), self.axis)
        rows = torch.cat(padded(values, self.side, self.fill))
        return None if self.rows == "masked" and bool(rows.all()) else rows

    def check_lengths(self, name: str, values: Sequence[Tensor]) -> None:
        """Raise ConfigError for rows of different length that cannot be joined."""
        lengths = {tuple(value.shape[1:]) for value in values}
        if self.rows == "alike" and len(lengths) > 1:
            raise ConfigError(
                f"batch_size: captions of different length cannot be in one batch of this model, whose text encoder "
                f"reads the padding ({name}: {sorted(lengths)}); set batch_size = 1"
            )

    def __str__(self) -> str:
        return self.kind if self.rows != "shared" or self.kind == "constant" else f"{self.kind}, shared by a batch"


def padded(values: Sequence[Tensor], side: str, fill: float) -> list[Tensor]:
    """Pad rows along their second axis to the longest."""
    if values[0].dim() < 2:
        return list(values)
    longest = max(value.shape[1] for value in values)
    rows = []
    for value in values:
        missing = longest - value.shape[1]
        filler = value.new_full((value.shape[0], missing, *value.shape[2:]), fill)
        rows.append(torch.cat([value, filler] if side == "right" else [filler, value], 1) if missing else value)
    return rows


def leaves(value: Any, like: Any = None, path: str = "") -> dict[str, Any]:
    """Return the arguments of a call by path: dictionaries, tuples and lists of several tensors are opened.

    ``like``: the arguments of a call for one row, which say what is opened; in a batch a list may hold its rows.
    """
    shape = value if like is None else like
    if isinstance(value, Mapping) and isinstance(shape, Mapping):
        inside: Any = [(name, each, shape.get(name)) for name, each in value.items()]
    elif isinstance(value, list | tuple) and is_opened(shape):
        inside = [(str(n), each, shape[n] if n < len(shape) else None) for n, each in enumerate(value)]
    else:
        return {path: value}
    values: dict[str, Any] = {}
    for name, each, below in inside:
        values |= leaves(each, below, f"{path}.{name}" if path else str(name))
    return values


def is_opened(value: Any) -> bool:
    """Return whether the entries of a sequence, in a call for one row, are arguments of their own."""
    if isinstance(value, list):
        return len(value) > 1 and all(torch.is_tensor(each) for each in value)
    return isinstance(value, tuple) and any(torch.is_tensor(each) for each in value)


def rebuilt(template: Any, values: Mapping[str, Any], path: str = "") -> Any:
    """Return arguments nested like ``template`` with ``values`` by path."""
    if isinstance(template, Mapping):
        return {k: rebuilt(v, values, f"{path}.{k}" if path else str(k)) for k, v in template.items()}
    if is_opened(template):
        return type(template)(rebuilt(each, values, f"{path}.{position}") for position, each in enumerate(template))
    return values[path]


def same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """Return whether two values are the same; numbers of tensors up to ``tolerance`` of the largest."""
    if torch.is_tensor(a) and torch.is_tensor(b):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if torch.equal(a, b) or not tolerance or not a.is_floating_point() or not a.numel():
            return torch.equal(a, b)
        return bool((a - b).abs().max() <= tolerance * a.abs().max())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def classify(
    name: str, first: Any, other: Any, larger: Any, both: Any, guided: tuple[Any, float, float] | None
) -> Argument:
    """Return what an argument depends on.

    ``first`` and ``other``: for two texts of different length; ``larger``: the first text at another size; ``both``: of
    the two texts in one batch; ``guided``: (the first text with another guidance, the first guidance, the other one).
    """
    by_text, by_size = not same(first, other), not same(first, larger)
    if guided is not None and not same(first, guided[0]):
        return _guidance(name, first, guided, both)
    grows = None
    if by_text and by_size and (grows := _growth(first, larger)) is None:
        raise FormatError(f"the argument {name} depends on the text and on the size of the image at once")
    kind: Kind = "text" if by_text else "size" if by_size else "constant"
    argument = _joining(name, kind, first, other, both)
    if grows is not None:
        argument = replace(argument, grows=grows, length=first.shape[1])
    if kind == "text":
        for value in (first, other):
            if argument.rows == "listed" and len(value) == 1:
                value = value[0]
            if type(value) is not int and not (torch.is_tensor(value) and value.dim()):
                raise FormatError(
                    f"the argument {name} depends on the text and is {_shape(value)}, not a tensor of rows"
                )
    return argument


def _growth(first: Any, larger: Any) -> float | None:
    """Return the number that a value has for each token of the image after those of the text; None: it has none."""
    if not (torch.is_tensor(first) and torch.is_tensor(larger) and first.dim() == larger.dim() == 2):
        return None
    short, long = sorted((first, larger), key=_length)
    common = short.shape[1]
    rest = long[:, common:]
    fits = rest.numel() > 0 and torch.equal(long[:, :common], short) and bool((rest == rest[0, 0]).all())
    return float(rest[0, 0]) if fits and bool((short[:, -rest.shape[1] // 2 :] == rest[0, 0]).all()) else None


def with_masks(calls: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Put ones in the place of masks that are None for a text without padding.

    Args:
        calls: the arguments of several calls, by path; they are changed.

    Returns:
        The text that each such mask is for.
    """
    masks: dict[str, str] = {}
    for name in calls[0]:
        tensors = [call for call in calls if torch.is_tensor(call[name])]
        missing = [call for call in calls if call[name] is None]
        if not tensors or not missing or not all(_is_mask(call[name]) for call in tensors):
            continue
        like = tensors[0][name]
        for text in calls[0]:
            if all(torch.is_tensor(each := call[text]) and each.dim() > 2 for call in calls) and all(
                call[text].shape[:2] == call[name].shape for call in tensors
            ):
                masks[name] = text
                for call in missing:
                    call[name] = torch.ones(call[text].shape[:2], dtype=like.dtype)
                break
    return masks


def _is_mask(value: Tensor) -> bool:
    return value.dim() == 2 and bool(((value == 0) | (value == 1)).all())


def _guidance(name: str, first: Any, guided: tuple[Any, float, float], both: Any) -> Argument:
    value, low, high = guided
    if torch.is_tensor(value) and value.numel() == 1 and low:
        factor = float(first.flatten()[0]) / low
        if float(value.flatten()[0]) == high * factor:
            return Argument("guidance", "joined" if both.numel() == 2 else "shared", value=factor)
    raise FormatError(f"the argument {name} depends on the guidance in another way than a multiple of it")


def _joining(name: str, kind: Kind, first: Any, other: Any, both: Any) -> Argument:
    value = first if kind == "constant" else None
    tolerance = ROUNDING if kind == "text" else 0.0
    candidates: list[Argument] = [Argument(kind, "shared", value=value)]
    if isinstance(first, list):
        candidates.append(Argument(kind, "listed", value=value))
    if torch.is_tensor(first) and torch.is_tensor(both) and first.dim() and first.shape[0] == 1:
        candidates.append(Argument(kind, "joined", value=value))
        if torch.is_tensor(other) and first.dim() > 1 and other.shape[1] != first.shape[1]:
            short = 0 if first.shape[1] < other.shape[1] else 1
            ends = both[short].reshape(both.shape[1], -1)
            candidates += [Argument(kind, "joined", "right", float(ends[-1, 0]), value)]
            candidates += [Argument(kind, "joined", "left", float(ends[0, 0]), value)]
    if torch.is_tensor(first):
        axes = [axis for axis in range(1, first.dim()) if first.shape[axis] == 1]
        candidates += [Argument(kind, "joined", value=value, axis=axis) for axis in axes]
    for candidate in candidates:
        try:
            joined = candidate.join([first, other])
        except RuntimeError:
            continue
        if same(joined, both, tolerance):
            return candidate
    if torch.is_tensor(both) and torch.is_tensor(other) and both.dim() > 1 and both.shape[0] == 2:
        pair = sorted((first, other), key=_length)
        longest = 1 if pair[1] is other else 0
        if _length(pair[0]) != _length(pair[1]) and same(pair[1], both[longest : longest + 1], tolerance):
            return Argument(kind, "alike", value=value)
    raise FormatError(
        f"the argument {name} of two rows is not what the rows have one by one ({_shape(first)} and {_shape(other)}; "
        f"together {_shape(both)})"
    )


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if torch.is_tensor(value) else type(value).__name__


def _length(value: Any) -> int:
    return int(value.numel()) if torch.is_tensor(value) else value if type(value) is int else 0
