"""What the networks of this package have in common with those of the libraries: a configuration, a dtype, a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class Recomputing(nn.Module):
    """A part of a network whose blocks may store their inputs alone, and be computed again for gradients."""

    #: gradient checkpointing: called with a block and its inputs
    recompute: Callable[..., Any] | None = None

    def run(self, block: nn.Module, *inputs: Any) -> Any:
        """Return the output of a block."""
        if self.recompute is None or not torch.is_grad_enabled():
            return block(*inputs)
        return self.recompute(block, *inputs)


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

    def enable_gradient_checkpointing(self, function: Callable[..., Any]) -> None:
        """Compute the blocks again for gradients, through a function that is called with a block and its inputs."""
        for module in self.modules():
            if isinstance(module, Recomputing):
                module.recompute = function

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device
