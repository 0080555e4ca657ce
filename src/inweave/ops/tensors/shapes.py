"""Results of operations on the meta device, made again from remembered shapes instead of computed.

    (operation, shapes, strides and types of tensors, other arguments) -> shapes, strides and types of the results

An operation is remembered if its results are new tensors without gaps that share nothing with each other and with its
arguments; one that changes an argument or returns a view of it never is. Results may be numbers too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

#: entries; one takes about a kilobyte, and a step of a large model has a few hundred
_MOST = 20_000
_META = torch.device("meta")
#: types of arguments that are their own part of a key
_VALUES = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)


class _Unknown(Exception):
    """Raised for an argument or a result that is not remembered."""


class _New(tuple[Any, ...]):
    """Size, stride and type of a tensor among results; a type of its own, so that it differs from numbers."""

    __slots__ = ()


_Results = _New | tuple[Any, ...]
#: None: an operation that is not remembered
_known: dict[Hashable, _Results | None] = {}


def run_on_meta(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what ``operation(*args, **kwargs)`` returns, computed once for arguments of the same shapes."""
    try:
        key = (operation, *map(_key, args), *((name, _key(value)) for name, value in kwargs.items()))
        is_known = key in _known
    except (_Unknown, TypeError):  # an argument that cannot be part of a key
        return operation(*args, **kwargs)
    if is_known and (results := _known[key]) is not None:
        return _remade(results)
    result = operation(*args, **kwargs)
    if not is_known:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = _remembered(operation, result, (args, kwargs))
    return result


def _key(value: Any) -> Hashable:
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if not value.is_meta or value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise _Unknown
        return value.shape, value.stride(), value.dtype
    if kind in (list, tuple):
        return (kind, *map(_key, value))
    if kind in _VALUES:
        return kind, value  # 1, 1.0 and True are equal, and give results of different types
    raise _Unknown


def _remembered(operation: Any, result: Any, arguments: object) -> _Results | None:
    if any(each.alias_info is not None for each in (*operation._schema.arguments, *operation._schema.returns)):
        return None
    used = {leaf.untyped_storage()._cdata for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}
    try:
        if isinstance(result, torch.Tensor):
            described: _New = _described(result, used)
            return described
        if type(result) is tuple and result:
            return tuple(_described(each, used) for each in result)
    except _Unknown:
        pass
    return None


def _described(result: Any, used: set[int]) -> Any:
    if type(result) in (int, float, bool, type(None)):
        return result
    if type(result) is not torch.Tensor or not result.is_meta or result.layout != torch.strided:
        raise _Unknown
    storage = result.untyped_storage()
    whole = storage.nbytes() == result.numel() * result.itemsize and not result.storage_offset()
    if storage._cdata in used or not whole:
        raise _Unknown
    used.add(storage._cdata)
    return _New((result.shape, result.stride(), result.dtype))


def _remade(results: _Results) -> Any:
    if isinstance(results, _New):
        return _tensor(results)
    return tuple(_tensor(each) if isinstance(each, _New) else each for each in results)


def _tensor(described: _New) -> torch.Tensor:
    size, stride, dtype = described
    return torch.empty_strided(size, stride, dtype=dtype, device=_META)
