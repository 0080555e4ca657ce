"""Trying a module with a small input: does its forward fulfill the promise of its kind?

The results are None and True if the module cannot be tried: it has no data yet, or its kind has no example.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

from inweave.ops.kinds.base import LayerKind, noise

_REFUSALS = (TypeError, ValueError, RuntimeError, IndexError)


@torch.no_grad()
def departure(module: nn.Module, kind: LayerKind) -> str | None:
    """Return how a forward differs from apply(x, W) + bias, or None if it does not."""
    weight = _weight(module)
    x = None if weight.is_meta else kind.example(module, weight)
    if x is None:
        return None
    expected = kind.apply(module, x, weight.T if kind.transposed else weight)
    if (bias := module._parameters.get("bias")) is not None:
        expected = expected + kind.along_outputs(module, bias)
    try:
        actual = type(module).forward(module, x)
    except _REFUSALS as error:
        return str(error)
    return None if _close(actual, expected) else "another result"


@torch.no_grad()
def adds_to_output(module: nn.Module, kind: LayerKind) -> bool:
    """Return whether forward(x) with W + D is forward(x) with W plus apply(x, D), in evaluation mode."""
    weight = _weight(module)
    x = None if weight.is_meta else kind.example(module, weight)
    if x is None:
        return True
    change = noise(weight, *weight.shape, seed=1) * weight.std()
    was_training = module.training
    module.eval()
    try:
        before = functional_call(module, {}, (x,))
        actual = functional_call(module, {"weight": weight + change}, (x,))
    except _REFUSALS:
        return True  # its forward takes inputs of another kind
    finally:
        module.train(was_training)
    expected = kind.add(before, kind.apply(module, x, change.T if kind.transposed else change), 1.0)
    return not isinstance(expected, torch.Tensor) or _close(actual, expected)


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.detach()


def _close(actual: object, expected: torch.Tensor) -> bool:
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return False
    room = 0.02 * float(expected.abs().max())  # rounding errors of a 16-bit weight; another function differs more
    return float((actual - expected).abs().max()) <= room
