"""Trying a module with a small input: does its forward fulfill the promise of its kind?

The results are None and True if the module cannot be tried: it has no data yet, or its kind has no example.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from inweave.errors import TargetError
from inweave.ops.common.precision import without_autocast
from inweave.ops.kinds.base import LayerKind, noise
from inweave.ops.tensors.subclasses import whole

_REFUSALS = (TypeError, ValueError, RuntimeError, IndexError, TargetError)


@torch.no_grad()
@without_autocast
def departure(module: nn.Module, kind: LayerKind) -> str | None:
    """Return how a forward differs from apply(x, W) + bias, or None if it does not."""
    weight = _weight(module)
    x = None if weight.is_meta else kind.example(module, weight)
    if x is None:
        return None
    try:
        weight = whole(weight)
        expected = kind.apply(module, x, weight.T if kind.transposed else weight)
        if (bias := module._parameters.get("bias")) is not None:
            expected = expected + kind.along_outputs(module, bias)
        actual = type(module).forward(module, x)
    except _REFUSALS as error:
        return str(error).splitlines()[0]
    return None if _close(actual, expected) else "another result"


@torch.no_grad()
@without_autocast
def adds_to_output(module: nn.Module, kind: LayerKind) -> bool:
    """Return whether forward(x) with W + D is forward(x) with W plus apply(x, D), in evaluation mode."""
    weight = _weight(module)
    x = None if weight.is_meta else kind.example(module, weight)
    if x is None:
        return True
    narrow = weight.dtype.itemsize == 1  # 8-bit floats have no arithmetic
    if narrow:
        weight, x = weight.float(), x.float()
    change = noise(weight, *weight.shape, seed=1) * weight.std()
    was_training = module.training
    module.eval()
    try:
        before = functional_call(module, {"weight": weight}, (x,))
        actual = functional_call(module, {"weight": weight + change}, (x,))
    except _REFUSALS:
        return not narrow  # its forward takes inputs of another kind, or a scale besides the 8-bit weight
    finally:
        module.train(was_training)
    expected = kind.add(before, kind.apply(module, x, change.T if kind.transposed else change), 1.0)
    return not isinstance(expected, Tensor) or _close(actual, expected)


def _weight(module: nn.Module) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.detach()


def _close(actual: object, expected: Tensor) -> bool:
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        return False
    room = 0.02 * float(expected.abs().max())  # rounding errors of a 16-bit weight; another function differs more
    return float((actual - expected).abs().max()) <= room
