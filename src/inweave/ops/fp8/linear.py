"""A linear layer whose frozen weight is in e4m3: half the bits, and twice the speed of its products on a GPU that has them.

    forward    y  = x8 W8^T * (scales of x's rows) * (scales of W's rows) + b
    backward   dx = dy8 V8^T * (scales of dy's rows) * (scales of V's rows)        V = W^T

A product needs one scale per row of both factors, so W is quantized twice, once along its outputs and once along its inputs; both
copies together have the bytes of one in 16 bits. x and dy are quantized when they come. The weight has no gradient. The forward
pass adds up in the tensor cores' own precision (fast accumulation), the backward pass in float32.

A layer is quantized in place: it stays the object that others refer to, with another class. Reading `weight` gives the numbers the
forward pass multiplies with; there is nothing to write to.

`_scaled_mm` is the product on a GPU; elsewhere the numbers are multiplied in float32, which is the definition and not fast. In eager code
quantizing x and the product are one operator of torch. In a compiled region the product alone is one, and the compiler makes the rest a
part of whatever produces x, or dy (`quantize`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from inweave.ops.fp8 import quantize
from inweave.ops.fp8.quantize import Rows, quantize_rows, traced_rows
from inweave.ops.implementation import first_derivative_only

#: of inputs and of outputs. Quantizing x takes the time that a small product saves: on one H200 4608x3072x3072 takes 81 us for 132
#: in bf16, 1024x1280x10240 59 for 64, 1024x1280x1280 51 for 39
SMALLEST_SIDE = 2048
MULTIPLE = 16  # of both sides, which the product wants
CAPABILITY = (8, 9)


class Fp8Weight(NamedTuple):
    """A weight (out, in): its rows, and those of its transpose, each in e4m3 with float32 scales (rows, 1)."""

    rows: torch.Tensor
    row_scales: torch.Tensor
    columns: torch.Tensor
    column_scales: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Fp8Weight:
        return cls(*quantize_rows(weight), *quantize_rows(weight.t().contiguous()))

    def split(self, count: int) -> list[Fp8Weight]:
        """The same for each of ``count`` layers whose weights are its rows: views, with the scales of columns in common."""
        rows, scales = (torch.split(tensor, tensor.shape[0] // count) for tensor in (self.rows, self.row_scales))
        columns = torch.split(self.columns, self.columns.shape[1] // count, 1)
        return [Fp8Weight(*parts, self.column_scales) for parts in zip(rows, scales, columns, strict=True)]

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """(out, in), as the forward pass uses it."""
        return (self.rows.float() * self.row_scales).to(dtype)


class Fp8Linear(nn.Linear):
    """Made by `quantize_linear`; its tensors are buffers, and `bias` is what it was."""

    dtype: torch.dtype  # of the original weight

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return self.quantized.dequantized(self.dtype)

    @property
    def quantized(self) -> Fp8Weight:
        return Fp8Weight(*(cast("torch.Tensor", self._buffers[name]) for name in Fp8Weight._fields))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # a matrix inside: what an autograd function returns as a view could not be added to in place
        rows = input.reshape(-1, self.in_features)
        work: Any = _TracedLinear.apply if quantize.is_traced() else torch.ops.inweave.fp8_linear
        result: torch.Tensor = work(rows, *self.quantized, self.bias)
        return result.view(*input.shape[:-1], self.out_features)


def fits(module: nn.Module) -> bool:
    """Whether a layer is a linear one whose products are faster in 8 bits."""
    if not isinstance(module, nn.Linear) or isinstance(module, Fp8Linear):
        return False
    sides = module.out_features, module.in_features
    return min(sides) >= SMALLEST_SIDE and not any(side % MULTIPLE for side in sides)


@torch.no_grad()
def quantize_linear(*linears: nn.Linear, device: torch.device | None = None) -> None:
    """Replace the weight of a layer, in place; ``device``: where to compute, if the weight waits elsewhere.

    Several layers of one shape and input are quantized as one matrix, whose parts they get: `joint_weight` finds it again.
    """
    weight = torch.cat([linear.weight.detach().to(device or linear.weight.device) for linear in linears])
    whole = Fp8Weight(*(tensor.to(linears[0].weight.device) for tensor in Fp8Weight.of(weight)))
    for linear, quantized in zip(linears, whole.split(len(linears)), strict=True):
        dtype = linear.weight.dtype
        del linear._parameters["weight"]
        linear.__class__ = Fp8Linear
        linear.dtype = dtype  # type: ignore[assignment]
        for name, tensor in quantized._asdict().items():
            linear.register_buffer(name, tensor)


def joint_weight(linears: Sequence[Fp8Linear]) -> Fp8Weight | None:
    """The matrix that these layers were quantized as, in this order; None if there is none, or if they were moved since."""
    first, count = linears[0].quantized, len(linears)
    out, into = first.rows.shape
    whole = Fp8Weight(
        first.rows.as_strided((count * out, into), (into, 1)),
        first.row_scales.as_strided((count * out, 1), (1, 1)),
        first.columns.as_strided((into, count * out), (count * out, 1)),
        first.column_scales,
    ) if _has_room(first, count) else None  # fmt: skip
    parts = whole.split(count) if whole is not None else ()
    same = [
        all(
            mine.data_ptr() == own.data_ptr() and mine.stride() == own.stride()
            for mine, own in zip(part, linear.quantized, strict=True)
        )
        for part, linear in zip(parts, linears, strict=False)
    ]
    return whole if same and all(same) else None


def _has_room(first: Fp8Weight, count: int) -> bool:
    """Whether so many parts can lie in the memory that the first one's tensors begin."""
    return all(
        tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize >= size * tensor.itemsize
        for tensor, size in (
            (first.rows, count * first.rows.numel()),
            (first.row_scales, count * first.row_scales.numel()),
            (first.columns, count * first.columns.numel()),
        )
    )


def scaled_product(
    x: Rows, rows: torch.Tensor, row_scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, *, fast: bool
) -> torch.Tensor:
    """x @ (rows * row_scales)^T + bias of a matrix x that is quantized, in this dtype."""
    q, scales = x
    if q.is_cuda:
        own = None if bias is None else bias.to(torch.bfloat16)
        product = torch._scaled_mm(  # some of its kernels take the columns of a part for those of a whole matrix
            q.contiguous(),
            rows.contiguous().t(),
            scale_a=scales,
            scale_b=row_scales.t(),
            bias=own,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
    else:
        product = (q.float() * scales) @ (rows.float() * row_scales).t()
        product = product if bias is None else product + bias
    return product.to(dtype)


def device_problems(device: torch.device) -> list[str]:
    """What stands against such products on a device; empty if it has them."""
    if device.type != "cuda":
        return [f"device {device}: 8-bit products need a CUDA device"]
    if (own := torch.cuda.get_device_capability(device)) < CAPABILITY:
        wanting = f"{CAPABILITY[0]}.{CAPABILITY[1]} or more (Ada, Hopper and later)"
        return [
            f"{torch.cuda.get_device_name(device)} has compute capability {own[0]}.{own[1]}: 8-bit products need {wanting}"
        ]
    try:
        factor, scale = (torch.ones(size, device=device) for size in ((16, 16), (16, 1)))
        rows = factor.to(torch.float8_e4m3fn)
        scaled_product((rows, scale), rows, scale, None, torch.bfloat16, fast=True)
    except (RuntimeError, AttributeError) as error:
        return [f"this torch cannot multiply 8-bit rows on {device}: {' '.join(str(error).split())[:200]}"]
    return []


# the operators

torch.library.define(
    "inweave::fp8_linear",
    "(Tensor x, Tensor rows, Tensor row_scales, Tensor columns, Tensor column_scales, Tensor? bias) -> Tensor",
)
torch.library.define("inweave::fp8_linear_backward", "(Tensor dy, Tensor columns, Tensor column_scales) -> Tensor")
torch.library.define(
    "inweave::fp8_product",
    "(Tensor x, Tensor scales, Tensor rows, Tensor row_scales, Tensor? bias, ScalarType dtype, bool fast) -> Tensor",
)


@torch.library.impl("inweave::fp8_linear", "default")
def _forward(
    x: torch.Tensor,
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    columns: torch.Tensor,
    column_scales: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return scaled_product(quantize_rows(x), rows, row_scales, bias, x.dtype, fast=True)


@torch.library.impl("inweave::fp8_linear_backward", "default")
def _backward(dy: torch.Tensor, columns: torch.Tensor, column_scales: torch.Tensor) -> torch.Tensor:
    return scaled_product(quantize_rows(dy), columns, column_scales, None, dy.dtype, fast=False)


@torch.library.impl("inweave::fp8_product", "default")
def _product(
    x: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    return scaled_product((x, scales), rows, row_scales, bias, dtype, fast=fast)


def _product_shape(x: torch.Tensor, rows: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    """Of x @ rows^T, which both operators return."""
    return x.new_empty(x.shape[0], rows.shape[0])


def _scaled_product_shape(
    x: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], rows.shape[0], dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, _, columns, column_scales, _ = inputs
    ctx.save_for_backward(columns, column_scales)
    ctx.set_materialize_grads(False)


@first_derivative_only
def _gradients(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    dx = torch.ops.inweave.fp8_linear_backward(dy, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None
    return dx, None, None, None, None, _bias_gradient(dy) if ctx.needs_input_grad[5] else None


def _bias_gradient(dy: torch.Tensor) -> torch.Tensor:
    return dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(dy.dtype)


torch.library.register_fake("inweave::fp8_linear", _product_shape)
torch.library.register_fake("inweave::fp8_linear_backward", _product_shape)
torch.library.register_fake("inweave::fp8_product", _scaled_product_shape)
torch.library.register_autograd("inweave::fp8_linear", _gradients, setup_context=_save)


class _TracedLinear(torch.autograd.Function):
    """`fp8_linear` for a compiler: it sees how x and dy are quantized, and that nothing else reads them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        rows: torch.Tensor,
        row_scales: torch.Tensor,
        columns: torch.Tensor,
        column_scales: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(columns, column_scales)
        y: torch.Tensor = torch.ops.inweave.fp8_product(*traced_rows(x), rows, row_scales, bias, x.dtype, True)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        columns, column_scales = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.inweave.fp8_product(*traced_rows(dy), columns, column_scales, None, dy.dtype, False)
        return dx, None, None, None, None, _bias_gradient(dy) if ctx.needs_input_grad[5] else None
