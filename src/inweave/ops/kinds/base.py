"""The contract of a layer kind: what an adapter must know about the module that it changes.

    W (out, into...)   the weight as the formulas see it; stored as (in, out) where the kind is `transposed`
    apply(x, D)        the term that a change D of the weight adds to the module's output

A kind promises one thing about the module's forward:

    forward(x) with W + D  =  add(forward(x) with W, apply(x, D))

This is why a merged and an unmerged adapter give the same output. A custom module may do more than its kind: the rest
of its forward is kept, and the change is added to its output.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from inweave.errors import ConfigError
from inweave.ops.delta import lora

#: applied to the values between two factors, with the axis of the ranks
OnHidden = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class LayerKind(ABC):
    """A kind of layer. Subclass it and implement `apply` for a module that none of the standard kinds describes.

    Args:
        transposed: the weight is stored as (in, out).
    """

    transposed: bool = False

    #: inputs are indices of rows, not vectors
    embedding: ClassVar[bool] = False
    #: the target "all-linear" includes it
    linear: ClassVar[bool] = False

    def shape(self, weight: Tensor) -> tuple[int, tuple[int, ...]]:
        """Return (out, into) of a stored weight."""
        rows, columns, *kernel = weight.shape
        return (columns, (rows,)) if self.transposed else (rows, (columns, *kernel))

    def groups(self, module: nn.Module) -> int:
        """Return the number of groups of inputs and outputs, as in a grouped convolution."""
        return 1

    @abstractmethod
    def apply(self, module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        """Return the module's linear function of an input with another weight and no bias.

        Args:
            module: the module, for its settings (stride, padding, ...).
            x: the module's input.
            weight: the weight as (out, into...), in the dtype to compute in.
        """

    def apply_low_rank(
        self,
        module: nn.Module,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        blocks: int,
        dtype: torch.dtype,
        on_hidden: OnHidden | None = None,
    ) -> Tensor:
        """Return `apply` of up @ down; override it to multiply in two steps, without computing the product.

        Args:
            module: the module, for its settings.
            x: the module's input.
            down: the factor (rank, into...).
            up: the factor (out, rank / blocks, ...).
            blocks: the number of diagonal blocks in the product.
            dtype: the dtype to compute in.
            on_hidden: applied to the values between the two steps; requires `in_two_steps`.

        Raises:
            ConfigError: ``on_hidden`` is set, but the kind does not multiply in two steps.
        """
        if on_hidden is not None:
            raise ConfigError(
                f"{type(self).__name__} multiplies both factors first: there are no values between them to drop"
            )
        out, into = up.shape[0], down.shape[1:]
        return self.apply(module, x, lora.product(up.to(dtype), down.to(dtype)).reshape(out, *into))

    @property
    def in_two_steps(self) -> bool:
        """Whether `apply_low_rank` computes down(x) and calls ``on_hidden`` with it."""
        method = type(self).apply_low_rank
        return method is not LayerKind.apply_low_rank and "on_hidden" in inspect.signature(method).parameters

    def along_outputs(self, module: nn.Module, vector: Tensor) -> Tensor:
        """Reshape one number per output so that it broadcasts over the module's output."""
        return vector

    def add(self, output: Tensor, change: Tensor, alpha: float) -> Tensor:
        """Return output + alpha * change; ``output`` is the value that the module returned."""
        return torch.add(output, change, alpha=alpha)

    def obstacle(self, module: nn.Module, weight: Tensor) -> str | None:
        """Return why this module cannot take an adapter, or None if it can."""
        return None

    def example(self, module: nn.Module, weight: Tensor) -> Tensor | None:
        """Return a small input to try the module with; None if it is never tried."""
        return None


def noise(weight: Tensor, *shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers like ``weight``, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(weight.device, weight.dtype)
