"""Products in parts of their rows on a real GPU: as exact as whole, twice the same bits, recorded in a CUDA graph, compiled."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from torch.nn import functional  # noqa: E402

from inweave.ops import products  # noqa: E402
from inweave.ops.frozen_linear import FrozenLinear  # noqa: E402

CUDA = torch.device("cuda")
#: rows, into, out: Flux's single blocks, SD 3.5's and SDXL's, a few rows that no tile divides
SHAPES = [
    (4608, 15360, 3072),
    (4608, 3072, 12288),
    (4096, 2432, 2432),
    (4096, 5120, 1280),
    (4097, 1280, 1280),
    (300, 1280, 1280),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_is_as_exact_as_torchs(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, into, out = shape
    torch.manual_seed(0)
    layer = FrozenLinear(into, out, device=CUDA, dtype=dtype).requires_grad_(False)
    x = torch.randn(1, rows, into, device=CUDA, dtype=dtype, requires_grad=True)
    grad = torch.randn(1, rows, out, device=CUDA, dtype=dtype)

    def results(function: object, *tensors: torch.Tensor) -> list[torch.Tensor]:
        y = function(*tensors)  # type: ignore[operator]
        return [y.detach(), *torch.autograd.grad(y, tensors[0], grad.to(y.dtype))]

    wide = [tensor.detach().double() for tensor in (x, layer.weight, layer.bias)]
    exact = results(functional.linear, wide[0].requires_grad_(), *wide[1:])
    plain, ours, again = results(functional.linear, x, layer.weight, layer.bias), results(layer, x), results(layer, x)
    for mine, theirs, right in zip(ours, plain, exact, strict=True):
        assert (mine - right).norm() <= 2 * (theirs - right).norm()
    assert all(torch.equal(one, two) for one, two in zip(ours, again, strict=True))


def test_large_products_are_divided_and_recorded() -> None:
    left = torch.randn(4608, 15360, device=CUDA, dtype=torch.bfloat16)
    right = torch.randn(15360, 3072, device=CUDA, dtype=torch.bfloat16)
    processors = torch.cuda.get_device_properties(CUDA).multi_processor_count
    assert bool(products._first_rows(left, right)) == bool(products.whole_rounds(4608, 3072, 15360, processors))
    total = torch.zeros(4608, 3072, device=CUDA, dtype=torch.bfloat16)
    direct = products.add_product(total.clone(), left, right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = products.add_product(total.clone(), left, right)
    graph.replay()
    assert torch.equal(recorded, direct)


def test_a_compiled_layer_has_the_bits_of_an_eager_one() -> None:
    torch._dynamo.reset()
    layer = FrozenLinear(5120, 1280, device=CUDA, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(4096, 5120, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    (eager,) = torch.autograd.grad(layer(x).sum(), x)
    (compiled,) = torch.autograd.grad(torch.compile(layer, fullgraph=True)(x).sum(), x)
    assert torch.equal(eager, compiled)
