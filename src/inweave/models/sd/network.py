"""What the networks of this package have in common with those of the libraries: a configuration, a dtype, a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, get_type_hints

import torch
from torch import nn


class Settings(dict[str, Any]):
    """A configuration whose entries are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def evaluate_annotations(kind: type) -> None:
    """Replace the annotations of a constructor by types: configurations are checked against them."""
    kind.__init__.__annotations__.update(get_type_hints(kind.__init__))  # type: ignore[misc]


class PlainNetwork(nn.Module):
    """A network made from its configuration: the arguments of its constructor, and settings of one value alone."""

    #: settings that the class computes with this value only
    fixed: ClassVar[Mapping[str, Any]] = {}
    #: settings that no output depends on
    unused: ClassVar[frozenset[str]] = frozenset()

    config: Settings

    def __init_subclass__(cls) -> None:
        evaluate_annotations(cls)

    @classmethod
    def from_config(cls, settings: Mapping[str, Any]) -> Self:
        """Return a network with new weights."""
        network = cls(**settings)
        network.config = Settings({**cls.fixed, **settings})
        return network

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        """Return whether the class computes these values of its arguments."""
        return True

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device
