"""The one way in which operators are registered with torch, as `torch.ops.inweave.<name>`.

    kernel      computes on every device, in eager code and in compiled regions
    shapes      empty results for tracing and for the meta device (`meta.py` of the folder)
    gradients   the backward pass, in terms of operators; first derivatives only. `save` fills its context

`torch.library.define` and `impl` are used rather than `custom_op`, which checks every call (results must not alias
inputs) and so more than doubles the host time of an eager call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inweave.ops.common.gradients import first_derivative_only


def register_operator(
    schema: str,
    kernel: Callable[..., Any],
    shapes: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    gradients: Callable[..., Any] | None = None,
) -> None:
    """Register an operator from its schema, ``"name(Tensor x, ...) -> Tensor"``.

    Args:
        schema: the name and the signature, in the language of torch's schemas.
        kernel: the implementation; results are new tensors, never views of the arguments.
        shapes: empty tensors with the shapes, dtypes and strides of the results.
        save: ``save(ctx, inputs, output)`` stores what the backward pass needs; only with ``gradients``.
        gradients: ``gradients(ctx, *grads)`` returns one gradient or None per argument; without it there are none.
    """
    name = f"inweave::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, "default", kernel)
    torch.library.register_fake(name, shapes)
    if gradients is not None:
        torch.library.register_autograd(name, first_derivative_only(gradients), setup_context=save)
