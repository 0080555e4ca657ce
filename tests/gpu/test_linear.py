"""The LoRA linear operation on a GPU: against float64, in CUDA graphs, twice the same bits, and in whole layers."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import inweave  # noqa: E402
from inweave.layers import fused, lora_layers  # noqa: E402
from inweave.ops.linear import Rounded, lora_backward, lora_linear, reference  # noqa: E402
from inweave.training.optim.flat import FlatParameters  # noqa: E402

CUDA = torch.device("cuda")
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
#: M, K, N, r: the sizes of the benchmark, ranks 1 to 256, sizes that no tile divides
SHAPES = [
    (77, 768, 768, 16), (256, 1536, 1536, 32), (256, 3072, 3072, 64), (4608, 3072, 3072, 16), (1, 64, 64, 1),
    (2, 320, 1280, 2), (77, 2048, 640, 4), (333, 130, 70, 3), (1000, 1000, 1000, 8), (4096, 640, 5120, 128),
    (129, 257, 513, 256), (50, 96, 8, 5), (8192, 320, 320, 32), (1, 3072, 18432, 16), (77, 7, 9, 7),
    (1024, 1280, 1280, 32), (4096, 1280, 1280, 32), (16384, 640, 640, 32), (4096, 3072, 12288, 16),
    (2100, 12288, 3072, 20),
]  # fmt: skip
#: for the other dtypes: every shape is compiled by itself, and what differs by dtype differs for these already
FEW = [(77, 768, 768, 16), (1, 64, 64, 1), (333, 130, 70, 3), (256, 3072, 3072, 64), (4096, 640, 5120, 128),
       (129, 257, 513, 256)]  # fmt: skip
CASES = [(shape, dtype) for dtype in FLOATS for shape in (SHAPES if dtype == torch.bfloat16 else FEW)]


@pytest.fixture(autouse=True)
def exact_float32() -> object:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def numbers(shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """x, W, b, down, up, dY"""
    m, k, n, r = shape
    generator = torch.Generator(CUDA).manual_seed(seed)
    sizes = [((m, k), 1.0), ((n, k), k**-0.5), ((n,), 1.0), ((r, k), k**-0.5), ((n, r), r**-0.5), ((m, n), 1.0)]
    return [(torch.randn(size, generator=generator, device=CUDA) * std).to(dtype) for size, std in sizes]


def plain(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    return functional.linear(x, weight, bias) + scale * functional.linear(functional.linear(x, down), up)


def gradients(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    x, weight, bias, down, up, grad = tensors
    leaves = [tensor.clone().requires_grad_() for tensor in (x, down, up)]
    y = function(leaves[0], weight, bias, leaves[1], leaves[2], scale)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def assert_as_good(ours: list[torch.Tensor], theirs: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    for at, (our, their, right) in enumerate(zip(ours, theirs, exact, strict=True)):
        room = torch.finfo(our.dtype).eps * right.norm()
        assert bool(our.isfinite().all())
        assert (our - right).norm() <= 2 * (their - right).norm() + room, at


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_error_is_at_most_twice_that_of_plain_torch(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tensors = numbers(shape, dtype)
    exact = gradients(plain, [tensor.double() for tensor in tensors], 0.7)
    assert_as_good(gradients(lora_linear, tensors, 0.7), gradients(plain, tensors, 0.7), exact)


def one_by_one(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    """With the frozen product as one: longer sums have larger errors, in any implementation."""
    count = down.shape[0] // up.shape[1]
    parts = zip(functional.linear(x, down).chunk(count, -1), up.chunk(count), strict=True)
    return functional.linear(x, weight, bias) + scale * torch.cat([functional.linear(s, own) for s, own in parts], -1)


#: M, K, N, r and number of layers: SDXL's self and text attention, Flux's, SD 3.5's, sizes that no tile divides
SIBLINGS = [
    ((1024, 1280, 1280, 32), 3), ((4096, 640, 640, 32), 3), ((77, 2048, 640, 32), 20), ((308, 2048, 1280, 32), 120),
    ((4608, 3072, 3072, 16), 3), ((154, 2432, 2432, 16), 3), ((333, 130, 70, 3), 3), ((129, 257, 513, 64), 2),
    ((1, 64, 64, 1), 2),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("shape", "count"), SIBLINGS, ids=str)
def test_layers_of_one_input_are_as_exact(shape: tuple[int, int, int, int], count: int, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and count > 20:
        pytest.skip("float64's matrices of this size take seconds")
    layers = [numbers(shape, dtype, seed) for seed in range(count)]
    x, grad = layers[0][0], torch.cat([layer[-1] for layer in layers], 1)
    tensors = [x, *(torch.cat(tensors) for tensors in list(zip(*layers, strict=True))[1:-1]), grad]
    exact = gradients(one_by_one, [tensor.double() for tensor in tensors], 0.7)
    ours = gradients(lora_linear, tensors, 0.7)
    assert_as_good(ours, gradients(one_by_one, tensors, 0.7), exact)
    again = gradients(lora_linear, tensors, 0.7)
    assert all(torch.equal(one, two) for one, two in zip(ours, again, strict=True))


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_adapter_alone_in_a_graph_twice_the_same_bits(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x, _, _, down, up, grad = numbers(shape, dtype)
    wide = [tensor.double().requires_grad_() for tensor in (x, down, up)]
    exact = torch.autograd.grad(0.7 * (wide[0] @ wide[1].T) @ wide[2].T, wide, grad.double())
    leaves = [tensor.clone().requires_grad_() for tensor in (x, down, up)]
    theirs = torch.autograd.grad(
        0.7 * functional.linear(functional.linear(leaves[0], leaves[1]), leaves[2]), leaves, grad
    )
    ours = lora_backward(grad, x, down, up, 0.7)
    assert [tensor.dtype for tensor in ours] == [dtype] * 3
    assert_as_good(list(ours), list(theirs), list(exact))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        lora_backward(grad, x, down, up, 0.7)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = lora_backward(grad, x, down, up, 0.7)
    graph.replay()
    first = [tensor.clone() for tensor in static]
    for tensor in static:
        tensor.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(one, two) for one, two in zip(first, static, strict=True))
    assert_as_good(first, list(theirs), list(exact))


@pytest.mark.parametrize(("shape", "dtype"), [case for case in CASES if case[1] != torch.float32], ids=str)
def test_float32_gradients_of_rounded_factors(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Added to what the buffer holds, without a rounding to 16 bits on the way."""
    x, weight, bias, down, up, grad = numbers(shape, dtype)
    masters = [factor.float().requires_grad_() for factor in (down, up)]
    returned = lora_linear(x, weight, bias, masters[0], masters[1], 0.7)
    returned.backward(grad)
    buffers = [torch.full_like(master, 3.0) for master in masters]
    copies = [Rounded(low, buffer) for low, buffer in zip((down, up), buffers, strict=True)]
    x.requires_grad_()
    y = lora_linear(x, weight, bias, masters[0], masters[1], 0.7, rounded_down=copies[0], rounded_up=copies[1])
    assert torch.equal(y, returned)
    y.backward(grad)
    wide = [tensor.detach().double() for tensor in (grad, x, down, up)]
    # S and dS are kept in 16 bits, as in plain torch; nothing else is rounded to them
    inner = (0.7 * wide[0] @ wide[3]).to(dtype).double()
    hidden = (wide[1] @ wide[2].T).to(dtype).double()
    exact = [inner.T @ wide[1], 0.7 * wide[0].T @ hidden]
    for master, buffer, right in zip(masters, buffers, exact, strict=True):
        assert master.grad is not None
        # another order of the same sums moves dS and S to a neighboring number here and there
        room = torch.finfo(dtype).eps * float(right.norm()) + 1e-5 * right.numel() ** 0.5
        assert float((buffer - 3.0 - right).norm()) <= room
        assert float((master.grad - right).norm()) <= room
        assert not torch.equal(master.grad, master.grad.to(dtype).float())


def test_reference_agrees() -> None:
    x, weight, bias, down, up, grad = numbers((333, 130, 70, 3), torch.float32)
    y, hidden = reference.forward(x, weight, bias, down, up, 0.7)
    torch.testing.assert_close(lora_linear(x, weight, bias, down, up, 0.7), y, rtol=1e-5, atol=1e-5)
    grad_down, grad_up = torch.zeros_like(down), torch.zeros_like(up)
    grad_x = reference.backward(grad, x, hidden, None, down, up, 0.7, grad_down=grad_down, grad_up=grad_up)
    for ours, theirs in zip(lora_backward(grad, x, down, up, 0.7), (grad_x, grad_down, grad_up), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def network(*names: str, dtype: torch.dtype, rank: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(320, 640), nn.GELU(), nn.Linear(640, 320, bias=False)).to(CUDA, dtype)
    for at, name in enumerate(names):
        inweave.inject(model, rank + at, 4.0, ["0", "2"], name=name)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_layers_are_as_good_as_the_general_path(
    names: tuple[str, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(*names, dtype=dtype)
    x = torch.randn(2, 77, 320, device=CUDA, dtype=dtype, requires_grad=True)

    def work(network: Any, inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [inputs, *(parameter for parameter in network.parameters() if parameter.requires_grad)]
        y = network(inputs)
        grads = torch.autograd.grad(y.float().square().mean() * 100, leaves)
        with torch.no_grad():
            return [y.detach(), *grads, network(inputs)]

    ours = work(model, x)
    layer = next(iter(lora_layers(model).values()))
    assert layer.operation.output(x, layer._acting, layer.training) is not None
    compiled = work(torch.compile(model, fullgraph=True), x)
    with monkeypatch.context() as patch:
        patch.setattr(fused, "DEVICES", frozenset())
        theirs = work(model, x)
        wide = network(*names, dtype=dtype).double()
        exact = work(wide, x.detach().double().requires_grad_())
    assert_as_good(ours, theirs, exact)
    assert_as_good(compiled, theirs, exact)


def test_compiled_layers_add_to_float32_buffers_in_a_graph() -> None:
    model = network("a", dtype=torch.bfloat16)
    x = torch.randn(2, 77, 320, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    branches = [layer.branch("a").float() for layer in lora_layers(model).values()]
    flat = FlatParameters({name: parameter for name, parameter in model.named_parameters() if name in parameters})
    names = {id(parameter): name for name, parameter in flat.parameters.items()}
    grads, values = flat.gradients(), flat.rounded(torch.bfloat16)
    for branch in branches:
        branch.rounded = {
            role: Rounded(values[flat.segments[names[id(factor)]].place].view(factor.shape), grads[names[id(factor)]])
            for role, factor in branch.roles().items()
        }

    def step(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        flat.rounded(torch.bfloat16)
        function(x).float().square().mean().backward()

    compiled = torch.compile(model, fullgraph=True)
    results = []
    for function in (model, compiled):
        step(function)  # libraries and compilers get ready
        flat.grads.zero_()
        step(function)
        step(function)
        results.append(flat.grads.clone())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(compiled)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(compiled)
    flat.grads.zero_()
    graph.replay()
    graph.replay()
    assert torch.equal(flat.grads, results[1])
    assert (results[0] - results[1]).norm() <= 2.0**-7 * results[0].norm()
    assert bool(results[0].any())
    before = flat.grads.clone()
    flat.values.mul_(2)  # the next replay rounds the new values
    flat.grads.zero_()
    graph.replay()
    assert not torch.equal(flat.grads * 2, before)
