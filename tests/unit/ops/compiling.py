"""Compiling a Triton kernel for a Hopper GPU on a machine that has none."""

from __future__ import annotations

from typing import Any

import pytest

#: parameter name -> its type; all others are pointers to bfloat16
_TYPES = {
    **dict.fromkeys(("positions", "channels", "groups", "chunk", "chunks", "rows", "width", "heads", "size"), "i32"),
    **dict.fromkeys(("left_width", "out", "into", "rank", "up_tiles", "up_size", "split_size"), "i32"),
    **dict.fromkeys(("cos", "sin", "grad_up", "grad_down", "parts", "partials", "means", "rstds"), "*fp32"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
}


def compiled_size(kernel: Any, constants: dict[str, Any]) -> int:
    """Return the size of a kernel's machine code in bytes."""
    return len(compiled_code(kernel, constants)["cubin"])


def compiled_code(kernel: Any, constants: dict[str, Any], *, warps: int = 4, aligned: bool = False) -> Any:
    """Return a kernel's code in all its forms; ``aligned``: pointers and steps are multiples of 16."""
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
