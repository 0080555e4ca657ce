"""Compiling a Triton kernel for a Hopper GPU on a machine that has none."""

from __future__ import annotations

from typing import Any

import pytest

#: what a parameter is by its name; all others are pointers to bfloat16
_TYPES = {
    "positions": "i32", "channels": "i32", "groups": "i32", "chunk": "i32", "chunks": "i32", "rows": "i32", "width": "i32",
    "heads": "i32", "size": "i32", "left_width": "i32", "cos": "*fp32", "sin": "*fp32",
    "out": "i32", "into": "i32", "rank": "i32", "up_tiles": "i32", "up_size": "i32", "split_size": "i32", "scale": "fp32",
    "grad_up": "*fp32", "grad_down": "*fp32", "parts": "*fp32", "eps": "fp32", "partials": "*fp32", "means": "*fp32", "rstds": "*fp32",
}  # fmt: skip


def compiled_size(kernel: Any, constants: dict[str, Any]) -> int:
    """The bytes of a kernel's machine code."""
    return len(compiled_code(kernel, constants)["cubin"])


def compiled_code(kernel: Any, constants: dict[str, Any], *, warps: int = 4, aligned: bool = False) -> Any:
    """A kernel's code in all its forms; ``aligned``: pointers and steps are multiples of 16."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else _type(name) for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    multiples = [
        place for place, name in enumerate(names)
        if aligned and (signature[name].startswith("*") or name.endswith(("_step", "width")) or name == "size")
    ]  # fmt: skip
    source = ASTSource(
        kernel, signature, constexprs=values, attrs={(at,): [["tt.divisibility", 16]] for at in multiples}
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm


def _type(name: str) -> str:
    return "i32" if name.endswith(("_step", "_rows")) else _TYPES.get(name, "*bf16")
