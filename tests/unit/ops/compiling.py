"""Compiling a Triton kernel for a Hopper GPU on a machine that has none."""

from __future__ import annotations

from typing import Any

import pytest

#: what a parameter is by its name; all others are pointers to bfloat16
_TYPES = {
    "positions": "i32", "channels": "i32", "groups": "i32", "chunk": "i32", "chunks": "i32", "rows": "i32", "width": "i32",
    "eps": "fp32", "partials": "*fp32", "means": "*fp32", "rstds": "*fp32",
}  # fmt: skip


def compiled_size(kernel: Any, constants: dict[str, Any]) -> int:
    """The bytes of a kernel's machine code."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else _TYPES.get(name, "*bf16") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values)
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])
