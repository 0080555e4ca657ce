"""What a `Weaver` says of itself, and why it is not copied."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NoReturn

from torch import nn

from inweave.errors import ConfigError
from inweave.weights.factors import AdapterCache, LoadedAdapter
from inweave.weights.stack import AdapterLike, Strength
from inweave.weights.stack_state import StackState
from inweave.weights.writer import Writer


class Described:
    """The representation of a Weaver, with its stack; it holds locks and a model's own tensors, so it has no copy."""

    _modules: Mapping[str, nn.Module]
    _state: StackState
    _writer: Writer
    _cache: AdapterCache
    _lock: threading.RLock

    def _look(self) -> None: ...

    def __repr__(self) -> str:
        stack = ", ".join(f"{loaded.name} at {_text(strength)}" for loaded, strength in self._state.stack) or "the base"
        return f"<Weaver of {', '.join(self._modules)}: {stack}{', uncertain' if self._state.uncertain else ''}>"

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """The networks by component."""
        return self._modules

    def loaded(self, adapter: AdapterLike) -> LoadedAdapter:
        """Return an adapter with its plan, read and cached; raise TargetError unless all of it has a place."""
        with self._lock:
            self._look()
            return self._cache.get(adapter)

    def read_ahead(self, adapter: AdapterLike) -> None:
        """Read an adapter into memory and check its numbers, from a thread that does not wait for stacks in work.

        Raises:
            InweaveError: it cannot be read, or does not fit the model; applying it raises the same.
        """
        self._cache.read(adapter).check_finite()

    @property
    def rounding_loss(self) -> dict[str, float]:
        """The fraction of the adapters' change that quantizing the merged weight lost, for each quantized weight."""
        changed = self._state.changed()
        return {f"{key[0]}.{key[1]}": loss for key, loss in self._writer.rounding_loss.items() if key in changed}

    @property
    def side_products(self) -> dict[str, int]:
        """The rank of the adapters' change of each quantized weight that keeps its bits: computed for every input."""
        return {f"{key[0]}.{key[1]}": change.rank for key, change in self._writer.side_products.items()}

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "a Weaver cannot be copied or pickled, since it changes the tensors of its own model in place; "
            "make a new one for the other model"
        )


def _text(strength: Strength) -> str:
    parts = [f"{name}={number:g}" for name, number in strength.components.items()]
    parts += [f"{name}={number:g}" for name, number in strength.blocks.items() if "#" not in name]
    overall = [] if parts and strength.overall == 1 else [f"{strength.overall:g}"]
    return " ".join([*overall, *parts])
