"""The measured kernels, and the plain torch they are compared with.

    lora        grad_x = s (g up) down,  grad_down = s (g up)^T x,  grad_up = s g^T (x down^T)
                torch: five products
    norm        SiLU of a group norm of an image, layer norm of a sum; forward and backward
                torch: functional.group_norm and silu, functional.layer_norm
    activation  GEGLU and the GELU with tanh, forward and backward
    attention   forward and backward by the kernel that was fastest for the shape, on sequence-first memory
                torch: its own choice; every backend is measured separately too
    merge       out = base + s up down for every attention weight of SDXL in one launch
                torch: one addmm per weight

Limits count every input and every result once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from inweave.ops import lora_backward
from inweave.ops.activation import geglu, tanh_gelu
from inweave.ops.attention import attention
from inweave.ops.group_norm import group_norm
from inweave.ops.merge import Product, WeightUpdate, merge_products
from inweave.ops.row_norm import add_layer_norm
from inweave.targets.bases import known_index

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]
#: (batch, tokens, width, rank)
LORA_SHAPES = ((1, 77, 768, 16), (1, 256, 1536, 32), (1, 256, 3072, 64), (1, 4608, 3072, 16))
TINY_LORA_SHAPES = ((1, 7, 24, 2), (1, 16, 48, 4), (1, 16, 96, 8), (2, 33, 96, 2))
#: (batch, channels, side): SDXL's three levels
IMAGE_SHAPES = ((1, 320, 128), (1, 640, 64), (1, 1280, 32))
TINY_IMAGE_SHAPES = ((1, 32, 6), (2, 64, 4), (1, 32, 5))
#: (rows, width): SDXL's two levels with attention
ROW_SHAPES = ((4096, 640), (1024, 1280))
TINY_ROW_SHAPES = ((5, 16), (3, 32))
#: (rows, width): the feed-forward parts of Flux and SD3.5 large
GELU_SHAPES = ((4096, 12288), (4096, 9728))
TINY_GELU_SHAPES = ((5, 64),)
#: (heads, queries, keys, size): Flux, SD3.5 large, SDXL's two levels, and its attention to the text
ATTENTION_SHAPES = (
    (24, 4608, 4608, 128),
    (38, 4429, 4429, 64),
    (10, 4096, 4096, 64),
    (20, 1024, 1024, 64),
    (10, 4096, 77, 64),
)
TINY_ATTENTION_SHAPES = ((2, 9, 9, 8), (2, 6, 6, 16), (2, 8, 3, 8))
MERGE_RANK = 32


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on fixed tensors, its peers, and the least arithmetic and traffic of the work.

    ``outputs`` and ``exact`` return the same tensors, the second in float64; ``traffic``: bytes read and written once.
    ``others``: further implementations, for the record. ``recordable``: whether a CUDA graph can hold it.
    """

    name: str
    ours: Callable[[], object]
    peers: Mapping[str, Callable[[], object]]
    operations: float
    traffic: float
    outputs: Mapping[str, Callable[[], Tensors]]
    exact: Callable[[], Tensors]
    others: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    recordable: bool = True


class Draw:
    """Random tensors of one dtype, the same ones every time."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=self._device, generator=self._generator).mul_(scale).to(self._dtype)


def differentiated(function: Function, grad: torch.Tensor, *inputs: torch.Tensor) -> Tensors:
    """Return the result and the gradients of the inputs."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    result = function(*leaves)
    return result.detach(), *torch.autograd.grad(result, leaves, grad)


def differentiable_case(
    name: str,
    ours: Function,
    torchs: Function,
    grad: torch.Tensor,
    *inputs: torch.Tensor,
    operations: float,
    others: Mapping[str, Callable[[], object]] | None = None,
) -> KernelCase:
    """Return a case of forward and backward pass: both read the inputs, one the gradient of the result."""
    element = grad.element_size()
    traffic = element * (2 * grad.numel() + 3 * sum(each.numel() for each in inputs))
    wide = [each.double() for each in (grad, *inputs)]
    run, run_torch = partial(differentiated, ours, grad, *inputs), partial(differentiated, torchs, grad, *inputs)
    return KernelCase(
        name, run, {"torch": run_torch}, operations, traffic, {"inweave": run, "torch": run_torch},
        partial(differentiated, torchs, *wide), others or {},
    )  # fmt: skip


def five_products(grad_out: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> Tensors:
    """Return the gradients of a LoRA at a scale of 1, which saves the launches that multiply by it."""
    grad, rows = grad_out.flatten(0, -2), x.flatten(0, -2)
    hidden = grad @ up
    return (hidden @ down).view_as(x), hidden.t() @ rows, grad.t() @ (rows @ down.t())


def lora_cases(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Iterator[KernelCase]:
    for shape in TINY_LORA_SHAPES if tiny else LORA_SHAPES:
        yield lora_case(*shape, Draw(device, dtype))


def lora_case(batch: int, tokens: int, width: int, rank: int, draw: Draw) -> KernelCase:
    """Return a case that is timed at a scale of 1, which suits five products, and compared at a scale of 0.5."""
    x, grad = draw(batch, tokens, width), draw(batch, tokens, width)
    down, up = draw(rank, width, scale=width**-0.5), draw(width, rank, scale=rank**-0.5)
    rows = batch * tokens

    def halved(tensors: Tensors) -> Tensors:
        return tuple(0.5 * each for each in tensors)

    return KernelCase(
        f"LoRA backward {batch} x {tokens} x {width}, rank {rank}",
        lambda: lora_backward(grad, x, down, up, 1.0),
        {"torch": lambda: five_products(grad, x, down, up)},
        operations=10 * rows * rank * width,
        traffic=(3 * rows * width + 4 * rank * width) * x.element_size(),
        outputs={
            "inweave": lambda: lora_backward(grad, x, down, up, 0.5),
            "torch": lambda: halved(five_products(grad, x, down, up)),
        },
        exact=lambda: halved(five_products(grad.double(), x.double(), down.double(), up.double())),
    )


def norm_cases(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Iterator[KernelCase]:
    """Yield norms in each implementation's preferred memory: channels first for torch, channels last for inweave."""
    for batch, channels, side in TINY_IMAGE_SHAPES if tiny else IMAGE_SHAPES:
        yield image_norm_case(batch, channels, side, Draw(device, dtype))
    for rows, width in TINY_ROW_SHAPES if tiny else ROW_SHAPES:
        yield row_norm_case(rows, width, Draw(device, dtype))


def image_norm_case(batch: int, channels: int, side: int, draw: Draw) -> KernelCase:
    x, grad = draw(batch, channels, side, side), draw(batch, channels, side, side)
    weight, bias, groups = draw(channels), draw(channels), min(channels // 4, 32)
    last = [each.contiguous(memory_format=torch.channels_last) for each in (grad, x)]

    def ours(images: torch.Tensor) -> torch.Tensor:
        return group_norm(images, weight, bias, groups, 1e-5, silu=True)

    def plain(images: torch.Tensor) -> torch.Tensor:
        return functional.silu(functional.group_norm(images, groups, weight.to(images), bias.to(images), 1e-5))

    name = f"group norm + SiLU {batch} x {channels} x {side} x {side}, both passes"
    case = differentiable_case(name, ours, plain, grad, x, operations=0)
    return KernelCase(
        name, lambda: differentiated(ours, *last), case.peers, 0, case.traffic,
        {**case.outputs, "inweave": lambda: differentiated(ours, *last)}, case.exact,
    )  # fmt: skip


def row_norm_case(rows: int, width: int, draw: Draw) -> KernelCase:
    weight, bias = draw(width), draw(width)

    def ours(x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return add_layer_norm(x, added, weight, bias, 1e-5)[1]

    def plain(x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x + added, (width,), weight.to(x), bias.to(x), 1e-5)

    tensors = [draw(rows, width) for _ in range(3)]
    return differentiable_case(f"sum + layer norm {rows} x {width}, both passes", ours, plain, *tensors, operations=0)


def activation_cases(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Iterator[KernelCase]:
    def plain(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return left * functional.gelu(right)

    for rows, width in TINY_ROW_SHAPES if tiny else ROW_SHAPES:
        draw = Draw(device, dtype)
        grad, x = draw(rows, 4 * width), draw(rows, 8 * width)
        yield differentiable_case(f"GEGLU {rows} x {8 * width}, both passes", geglu, plain, grad, x, operations=0)

    def plain_gelu(x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x, approximate="tanh")

    for rows, width in TINY_GELU_SHAPES if tiny else GELU_SHAPES:
        draw = Draw(device, dtype)
        grad, x = draw(rows, width), draw(rows, width)
        name = f"GELU with tanh {rows} x {width}, both passes"
        yield differentiable_case(name, tanh_gelu, plain_gelu, grad, x, operations=0)


def attention_cases(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Iterator[KernelCase]:
    for heads, queries, keys, size in TINY_ATTENTION_SHAPES if tiny else ATTENTION_SHAPES:
        draw = Draw(device, dtype)
        # the memory layout of the surrounding layers
        tensors = [draw(1, count, heads, size).transpose(1, 2) for count in (queries, queries, keys, keys)]
        yield differentiable_case(
            f"attention {heads} heads of {size}, {queries} x {keys}, both passes",
            attention, functional.scaled_dot_product_attention, *tensors,
            operations=3.5 * 4 * heads * queries * keys * size, others=attention_backends(tensors),
        )  # fmt: skip


def attention_backends(tensors: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Return every backend of torch, and inweave's deterministic attention; nothing without a GPU."""
    if tensors[0].device.type != "cuda":
        return {}

    def only(backend: SDPBackend) -> Callable[[], object]:
        def work() -> object:
            with sdpa_kernel(backend):
                return differentiated(functional.scaled_dot_product_attention, *tensors)

        return work

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    fixed = lambda *inputs: attention(*inputs, deterministic=True)  # noqa: E731
    return {
        **{name: only(each) for name, each in backends.items()},
        "deterministic": lambda: differentiated(fixed, *tensors),
    }


def merge_cases(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Iterator[KernelCase]:
    rank = 4 if tiny else MERGE_RANK
    shapes = [(48, 24), (96, 48)] * 3 if tiny else [
        (shape[0], shape[1])
        for name, shape in known_index("sdxl").components["unet"].shapes.items()
        if ".attn" in name and name.endswith(".weight") and len(shape) == 2
    ]  # fmt: skip
    draw = Draw(device, dtype)
    targets = []
    for out, into in shapes:
        base, up, down = draw(out, into, scale=0.02), draw(out, rank, scale=0.02), draw(rank, into, scale=0.02)
        targets.append(WeightUpdate(base, torch.empty_like(base), (Product(up, down, 0.8),)))
    size = sum(target.base.numel() for target in targets)
    factors = sum(rank * (out + into) for out, into in shapes)

    def run() -> Tensors:
        merge_products(targets)
        return tuple(target.out for target in targets)

    def addmm() -> Tensors:
        pairs = [(target, product) for target in targets for product in target.products]
        return tuple(torch.addmm(t.base, p.up, p.down, alpha=p.scale, out=t.out) for t, p in pairs)

    def exact() -> Tensors:
        pairs = [(target, product) for target in targets for product in target.products]
        return tuple(t.base.double() + p.scale * (p.up.double() @ p.down.double()) for t, p in pairs)

    def ready() -> Callable[[], object]:
        """Return a launch whose tables are on the device, as a weaver keeps it."""
        from inweave.ops.merge import prepare_merge

        return prepare_merge(targets).run

    yield KernelCase(
        f"merge of rank {rank} into {len(targets)} weights, {size / 1e6:.3g} M numbers",
        ready() if device.type == "cuda" else run,
        {"torch": addmm},
        operations=2 * rank * size,
        traffic=(2 * size + factors) * targets[0].base.element_size(),
        outputs={"inweave": run, "torch": addmm},
        exact=exact,
        recordable=False,  # the host reads whether values overflowed
    )


GROUPS: Mapping[str, Callable[..., Iterator[KernelCase]]] = {
    "lora": lora_cases,
    "norm": norm_cases,
    "activation": activation_cases,
    "attention": attention_cases,
    "merge": merge_cases,
}
