"""Marks of written tensors: where each was, and its version after the last write.

Any difference is a change from outside. Whether there is one is asked for every stack, so it is one comparison of two
lists of versions; the mark of a tensor is made only when it is asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from operator import attrgetter

import torch

from inweave.weights.live import LiveHome, LiveModel, Mark
from inweave.weights.stack import TensorKey

_version = attrgetter("_version")


class Marks:
    """The marks of every tensor that was ever written, by key."""

    def __init__(self, live: LiveModel) -> None:
        self._model = weakref.ref(live)  # a claim may hold the marks for longer
        self._marks: dict[TensorKey, Mark] = {}
        self._owners: list[torch.Tensor] = []  # in the order of the marks
        self._versions: list[int] = []
        self._at = -1  # the look that found these owners; -1: unknown
        self._late = False  # the versions are newer than the marks

    @property
    def _live(self) -> LiveModel:
        live = self._model()
        assert live is not None
        return live

    def __contains__(self, key: TensorKey) -> bool:
        return key in self._marks

    def keys(self) -> Collection[TensorKey]:
        """Return the marked tensors."""
        return self._marks.keys()

    def get(self, key: TensorKey) -> Mark | None:
        """Return the mark of a tensor."""
        self._catch_up()
        return self._marks.get(key)

    def items(self) -> list[tuple[TensorKey, Mark]]:
        """Return the tensors with their marks."""
        self._catch_up()
        return list(self._marks.items())

    def set(self, key: TensorKey, mark: Mark) -> None:
        """Record one tensor."""
        self._catch_up()
        self._marks[key], self._at = mark, -1

    def drop(self, key: TensorKey) -> None:
        """Forget one tensor."""
        self._catch_up()
        self._marks.pop(key, None)
        self._at = -1

    def record(self, homes: Mapping[TensorKey, LiveHome]) -> None:
        """Record the present state of these tensors as written; all others were found untouched."""
        if self._at == self._live.looks and homes.keys() <= self._marks.keys():
            self._versions, self._late = list(map(_version, self._owners)), True
            return
        self._catch_up()
        self._marks.update([(key, home.mark()) for key, home in homes.items()])
        every = homes if len(homes) == len(self._marks) else {key: self._live.home(key) for key in self._marks}
        counted = all(home.counts for home in every.values())
        self._owners = [every[key].owner for key in self._marks] if counted else []
        self._versions = list(map(_version, self._owners))
        self._at = self._live.looks if counted else -1

    def untouched(self) -> bool:
        """Return whether no tensor was moved or changed since it was recorded."""
        return self._at == self._live.looks and list(map(_version, self._owners)) == self._versions

    def release(self) -> None:
        """Refer to no tensor any more; only `get` is asked from now on."""
        self._catch_up()
        self._owners, self._versions = [], []

    def _catch_up(self) -> None:
        if self._late:
            versions = zip(self._marks.items(), self._versions, strict=True)
            self._marks = {key: (place, version) for (key, (place, _)), version in versions}
            self._late = False
