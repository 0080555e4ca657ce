"""The public `resolve`: where every tensor of an adapter goes on a base, for files and objects alike."""

from __future__ import annotations

import os

from inweave.adapter import Adapter
from inweave.errors import TargetError
from inweave.exchange.load import load, open_base
from inweave.targets import resolve as resolution
from inweave.targets.index import ModelIndex
from inweave.targets.plan import Plan


def resolve(
    adapter: Adapter | str | os.PathLike[str], base: ModelIndex | str | os.PathLike[str], *, strict: bool = True
) -> Plan:
    """Return the plan of ``adapter`` on ``base``, which `MergedSource`, `Weaver` and `bake` carry out.

    Args:
        adapter: an adapter or its path.
        base: an index (`index_of` makes one of any model), a known base by name, or a path.
        strict: raise if any tensor cannot be used; otherwise ``plan.report`` lists those.

    Returns:
        The plan: which tensors of the base change, and how.

    Raises:
        TargetError: ``strict``, and a tensor cannot be used.
        FormatError: a file cannot be read.
        ConfigError: the base is unknown.
    """
    index = base if isinstance(base, ModelIndex) else open_base(base)
    if isinstance(adapter, Adapter):
        return resolution.resolve(adapter, index, strict=strict)
    try:
        return resolution.resolve(load(adapter), index, strict=strict)
    except TargetError as error:
        raise TargetError(f"{os.fspath(adapter)}: {error}") from None
