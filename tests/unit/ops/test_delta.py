"""Each formula against an independent one: loops, einsum, or the library that trains with it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import pytest
import torch

import inweave.adapter as wa
from inweave.adapter import Factors, Magnitude, Residual, Tensor
from inweave.errors import TargetError
from inweave.ops.delta import change, delta, padded
from inweave.ops.tensors.decode import TORCH

Shape = tuple[int, ...]
NAMES = {dtype: name for name, dtype in TORCH.items()}
GENERATOR = torch.Generator()


def pack(tensor: torch.Tensor) -> Tensor:
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    return Tensor(NAMES[tensor.dtype], tuple(tensor.shape), bytes(flat.tolist()))


@pytest.fixture(autouse=True)
def seeded() -> None:
    GENERATOR.manual_seed(0)


def numbers(*shape: int, std: float = 1.0) -> torch.Tensor:
    return std * torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def built(kind: type[Any], **fields: Any) -> Any:
    return kind(**{k: pack(v) if isinstance(v, torch.Tensor) else v for k, v in fields.items()})


def close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-11) -> None:
    assert result.shape == expected.shape
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("base", [(7, 5), (7, 5, 1, 1)])
@pytest.mark.parametrize("kernel", [(), (1, 1)])
def test_lora_matrix_and_1x1_convolution(base: Shape, kernel: Shape) -> None:
    up, down = numbers(7, 3), numbers(3, 5)
    lora = built(wa.Lora, up=up.reshape(7, 3, *kernel), down=down.reshape(3, 5, *kernel), alpha=2.0)
    expected = torch.zeros(7, 5, dtype=torch.float64)
    for o, i, r in itertools.product(range(7), range(5), range(3)):
        expected[o, i] += 2.0 / 3.0 * up[o, r] * down[r, i]
    close(change(lora, numbers(*base), 0.3), 0.3 * expected.reshape(base))


@pytest.mark.parametrize("core", [False, True])
def test_lora_convolution(core: bool) -> None:
    up, down, image = numbers(7, 3, 1, 1), numbers(3, 5, 3, 2), numbers(2, 5, 6, 6)
    lora = built(wa.Lora, up=up, down=down, alpha=2.0, rslora=True)
    inner = torch.conv2d(image, down) / math.sqrt(3)
    if core:
        mid, down = numbers(3, 4, 3, 2), numbers(4, 5, 1, 1)
        lora = built(wa.Lora, up=up, mid=mid, down=down, alpha=2.0)
        inner = torch.conv2d(torch.conv2d(image, down), mid) / 4
    close(torch.conv2d(image, delta(lora, numbers(7, 5, 3, 2))), torch.conv2d(inner, up) * 2)


def test_lora_in_groups() -> None:
    up, down = numbers(9, 2), numbers(6, 5)
    expected = torch.cat([up[3 * g : 3 * g + 3] @ down[2 * g : 2 * g + 2] for g in range(3)]) * 3 / 6
    close(delta(built(wa.Lora, up=up, down=down, alpha=3.0), numbers(9, 5)), expected)


@pytest.mark.parametrize("base", [(7, 6), (7, 2, 3, 1)])
@pytest.mark.parametrize("stored_4d", [False, True])
def test_loha(base: Shape, stored_4d: bool) -> None:
    roles = {"w1_a": numbers(7, 3), "w1_b": numbers(3, 6), "w2_a": numbers(7, 2), "w2_b": numbers(2, 6)}
    expected = torch.einsum("oa,ac,ob,bc->oc", *roles.values()) * 2 / 3
    if stored_4d:
        shapes = {"w1_a": (7, 3, 1, 1), "w1_b": (3, 2, 3, 1), "w2_a": (7, 2, 1, 1), "w2_b": (2, 2, 3, 1)}
        roles = {role: tensor.reshape(shapes[role]) for role, tensor in roles.items()}
    close(change(built(wa.Loha, **roles, alpha=2.0), numbers(*base), 0.7), 0.7 * expected.reshape(base))


def test_loha_tucker() -> None:
    one = {"t1": numbers(3, 3, 2, 3), "w1_a": numbers(3, 7), "w1_b": numbers(3, 5)}
    two = {"t2": numbers(3, 3, 2, 3), "w2_a": numbers(3, 7), "w2_b": numbers(3, 5)}
    left, right = (torch.einsum("abhw,ao,bi->oihw", *roles.values()) for roles in (one, two))
    close(delta(built(wa.Loha, **one, **two, alpha=2.0), numbers(7, 5, 2, 3)), left * right * 2 / 3)


@pytest.mark.parametrize("left", ["full", "low"])
@pytest.mark.parametrize("right", ["full", "low"])
def test_lokr_matrix(left: str, right: str) -> None:
    w1_a, w1_b, w2_a, w2_b = numbers(2, 3), numbers(3, 5), numbers(4, 2), numbers(2, 3)
    roles = {"w1": w1_a @ w1_b} if left == "full" else {"w1_a": w1_a, "w1_b": w1_b}
    roles |= {"w2": w2_a @ w2_b} if right == "full" else {"w2_a": w2_a, "w2_b": w2_b}
    scale = {("full", "full"): 1.0, ("low", "full"): 5 / 3}.get((left, right), 5 / 2)
    expected = torch.zeros(8, 15, dtype=torch.float64)
    for i, j, k, m in itertools.product(range(2), range(5), range(4), range(3)):
        expected[i * 4 + k, j * 3 + m] = (w1_a @ w1_b)[i, j] * (w2_a @ w2_b)[k, m]
    close(delta(built(wa.Lokr, **roles, alpha=5.0), numbers(8, 15)), scale * expected)


@pytest.mark.parametrize("layout", ["conv", "flat", "low", "tucker"])
def test_lokr_convolution(layout: str) -> None:
    weight, w1 = numbers(6, 8, 3, 3), numbers(2, 2)
    w2, scale = numbers(3, 4, 3, 3), 1.0
    roles = {"w2": w2 if layout == "conv" else w2.reshape(3, 36)}
    if layout == "tucker":
        roles = {"t2": numbers(2, 2, 3, 3), "w2_a": numbers(2, 3), "w2_b": numbers(2, 4)}
        w2, scale = torch.einsum("abhw,ao,bi->oihw", *roles.values()), 5 / 2
    elif layout == "low":
        roles = {"w2_a": numbers(3, 4), "w2_b": numbers(4, 36)}
        w2, scale = (roles["w2_a"] @ roles["w2_b"]).reshape(3, 4, 3, 3), 5 / 4
    expected = scale * torch.einsum("ab,cdhw->acbdhw", w1, w2).reshape(6, 8, 3, 3)
    close(delta(built(wa.Lokr, w1=w1, **roles, alpha=5.0), weight), expected)


def test_lokr_with_the_kernel_split_over_both_factors() -> None:
    w1, w2 = numbers(2, 6), numbers(3, 12)
    lokr, expected = built(wa.Lokr, w1=w1, w2=w2), torch.einsum("ab,cd->acbd", w1, w2)
    close(delta(lokr, numbers(6, 8, 3, 3)), expected.reshape(6, 8, 3, 3))


def test_vera_cuts_the_shared_pair() -> None:
    up, down, out, into = numbers(9, 3), numbers(3, 8), numbers(7), numbers(3)
    vera = built(wa.Vera, up=up, down=down, lambda_b=out, lambda_d=into)
    close(delta(vera, numbers(7, 5)), torch.diag(out) @ up[:7] @ torch.diag(into) @ down[:, :5])
    assert delta(vera).shape == (7, 8)


def test_sparse_residual_belongs_to_the_weight() -> None:
    up, down = numbers(7, 2), numbers(2, 6)
    indices = torch.tensor([[0, 6, 3, 3], [5, 0, 2, 2]], dtype=torch.int16)
    values = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    residual = Residual(pack(indices), pack(values), pack(torch.tensor([7, 6], dtype=torch.int16)))
    expected = up @ down
    for row, column, value in zip(*indices.tolist(), values.tolist(), strict=True):
        expected[row, column] += value
    lora = built(wa.Lora, up=up, down=down, alpha=3.0, residual=residual)
    close(change(lora, numbers(7, 2, 3, 1), 0.5), 0.75 * expected.reshape(7, 2, 3, 1))
    outside = dataclasses.replace(residual, size=pack(torch.tensor([7, 5], dtype=torch.int16)))
    with pytest.raises(TargetError, match="out of range"):
        delta(dataclasses.replace(lora, residual=outside), numbers(7, 6))


def test_full() -> None:
    value, weight = numbers(4, 3), numbers(4, 3)
    close(change(built(wa.Full, value=value, alpha=9.0), weight, 0.25), value / 4)
    close(weight + change(built(wa.Full, value=value, mode="set"), weight, 0.25), value)
    close(change(built(wa.Full, value=value[0], alpha=2.0, bias_rank=3), numbers(3), 0.5), value[0] / 3)


def dora_by_loops(changed: torch.Tensor, magnitude: torch.Tensor, axis: int) -> torch.Tensor:
    result = torch.empty_like(changed)
    for i in range(changed.shape[axis]):
        slab = changed.select(axis, i)
        result.select(axis, i).copy_(magnitude[i] * slab / slab.square().sum().sqrt())
    return result


@pytest.mark.parametrize("layout", [(6,), (6, 1), (1, 6), (6, 1, 1, 1), (1, 6, 1, 1)])
@pytest.mark.parametrize("axis", ["out", "in"])
@pytest.mark.parametrize("shape", [(6, 6), (6, 6, 3, 2)])
def test_dora_on_either_axis(layout: Shape, axis: Any, shape: Shape) -> None:
    """Square on purpose: only the axis, never a size, may decide."""
    weight, magnitude = numbers(*shape), numbers(6).abs() + 0.5
    up, down, stored = numbers(6, 3), numbers(3, math.prod(shape[1:])), pack(magnitude.reshape(layout))
    lora = built(wa.Lora, up=up, down=down, alpha=2.0, magnitude=Magnitude(stored, axis))
    full = dora_by_loops(weight + (up @ down * 2 / 3).reshape(shape), magnitude, 0 if axis == "out" else 1)
    close(weight + delta(lora, weight), full)
    close(change(lora, weight, 0.4), 0.4 * (full - weight))


def test_dora_goes_with_every_algorithm_that_adds() -> None:
    weight, magnitude = numbers(6, 4), numbers(6).abs() + 0.5
    plain: list[Factors] = [
        built(wa.Lokr, w1=numbers(3, 2), w2=numbers(2, 2)),
        built(wa.Loha, w1_a=numbers(6, 2), w1_b=numbers(2, 4), w2_a=numbers(6, 2), w2_b=numbers(2, 4)),
        built(wa.Glora, a1=numbers(4, 2), a2=numbers(2, 4), b1=numbers(6, 2), b2=numbers(2, 4), alpha=1.0),
        built(wa.Full, value=numbers(6, 4)),
    ]
    for factors in plain:
        dora = dataclasses.replace(factors, magnitude=Magnitude(pack(magnitude), "out"))
        close(weight + delta(dora, weight), dora_by_loops(weight + delta(factors, weight), magnitude, 0))


def test_dora_leaves_a_zero_row_at_zero() -> None:
    norms = Magnitude(pack(numbers(4)), "out")
    lora = built(wa.Lora, up=torch.zeros(4, 2), down=numbers(2, 3), magnitude=norms)
    assert torch.equal(delta(lora, torch.zeros(4, 3)), torch.zeros(4, 3))


@pytest.mark.parametrize("kernel", [(), (3, 2)])
@pytest.mark.parametrize("layout", ["new", "old"])
@pytest.mark.parametrize("core", [False, True])
def test_glora(kernel: Shape, layout: str, core: bool) -> None:
    ones = (1,) * len(kernel)
    roles = {"a1": numbers(5, 3, *ones), "a2": numbers(3, 5, *ones)}
    roles |= {"b1": numbers(7, 3, *ones), "b2": numbers(3, 5, *(ones if core else kernel))}
    weight, mid = numbers(7, 5, *kernel), numbers(3, 3, *kernel)
    turned = torch.einsum("oi...,ij,jk->ok...", weight, roles["a1"].flatten(1), roles["a2"].flatten(1))
    added = torch.einsum("or,ri...->oi...", roles["b1"].flatten(1), roles["b2"])
    if core:
        added = torch.einsum("oa,ab...,bi->oi...", roles["b1"].flatten(1), mid, roles["b2"].flatten(1))
    if layout == "old":
        roles = {"a1": roles["a2"], "a2": roles["a1"], "b1": roles["b2"], "b2": roles["b1"]}
    glora = built(wa.Glora, **roles, bm=mid if core else None, alpha=2.0)
    assert glora.layout == layout
    close(change(glora, weight, 0.6), 0.6 * (turned + added) * 2 / 3)
    assert glora.fits(tuple(weight.shape)) and glora.weight_inputs == 5
    assert not glora.fits((7, 10, *kernel)) and not glora.fits((7,))
    other = dataclasses.replace(glora, **{("a1" if layout == "new" else "a2"): pack(numbers(4, 3)),
                                          ("a2" if layout == "new" else "a1"): pack(numbers(3, 4))})  # fmt: skip
    assert not other.fits(tuple(weight.shape))  # the b part alone has the weight's shape


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("shape", [(6, 6), (6, 6, 2, 3)])
def test_ia3(on_input: bool, shape: Shape) -> None:
    weight, vector = numbers(*shape), numbers(6)
    expected = torch.einsum("oi...,i->oi..." if on_input else "oi...,o->oi...", weight, vector)
    for layout in ((6,), (6, 1), (1, 6), (1, 6, 1, 1)):
        offset = built(wa.Ia3, vector=vector.reshape(layout), on_input=on_input, convention="offset")
        factor = dataclasses.replace(offset, convention="factor")
        close(change(offset, weight, 0.3), 0.3 * expected)
        close(weight + delta(factor, weight), expected)
        close(change(factor, weight, 0.3), 0.3 * (expected - weight))


def test_ia3_factors_scale_a_bias() -> None:
    bias, vector = numbers(6), numbers(6, 1)
    factor = built(wa.Ia3, vector=vector, on_input=False, convention="factor")
    close(bias + delta(factor, bias), bias * vector[:, 0])
    for fields in ({"on_input": True}, {"convention": "offset"}):
        with pytest.raises(TargetError, match="bias"):
            delta(dataclasses.replace(factor, **fields), bias)


@pytest.mark.parametrize("alpha", [None, 0.0, 0.1, 100.0])
@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("shape", [(12, 5), (12, 5, 3, 2)])
def test_oft(alpha: float | None, strength: float, shape: Shape) -> None:
    blocks, weight, rescale = numbers(3, 4, 4), numbers(*shape), numbers(12, *[1] * (len(shape) - 1))
    skew = blocks - blocks.mT
    skew = skew * min(1.0, 12 * (alpha or math.inf) / skew.square().sum().sqrt().item())
    eye = torch.eye(4, dtype=torch.float64)
    turn = (eye + skew) @ torch.linalg.inv(eye - skew)
    whole = torch.block_diag(*(strength * turn + (1 - strength) * eye))
    expected = (whole.T @ weight.flatten(1)).reshape(shape)
    oft = built(wa.Oft, blocks=blocks, alpha=alpha)
    close(weight + change(oft, weight, strength), expected)
    rescaled = dataclasses.replace(oft, rescale=pack(rescale))
    close(weight + change(rescaled, weight, strength), rescale * expected)
    solved = dataclasses.replace(oft, blocks=pack(turn), solved=True)
    close(weight + change(solved, weight, strength), expected)


@pytest.mark.parametrize("alpha", [None, 0.1])
@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize(("stages", "count", "size"), [(1, 3, 2), (2, 6, 4), (3, 4, 2)])
def test_boft_as_lycoris(alpha: float | None, strength: float, stages: int, count: int, size: int) -> None:
    lycoris = pytest.importorskip("lycoris.functional.boft")
    blocks, out = numbers(stages, count, size, size).float(), count * size
    weight, rescale = numbers(out, 5, 2, 1).float(), numbers(out, 1, 1, 1).float()
    expected = lycoris._diff_weight(weight, blocks, rescale, out * (alpha or 0.0), strength)
    boft = built(wa.Boft, blocks=blocks, rescale=rescale, alpha=alpha)
    close(change(boft, weight, strength), expected, 1e-4)


@pytest.mark.parametrize("terms", [None, 1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("shape", [(7, 12), (7, 4, 3, 1)])
def test_oft_on_inputs_as_peft(terms: int | None, share: bool, shape: Shape) -> None:
    peft = pytest.importorskip("peft.tuners.oft.layer")
    entries, weight = numbers(1 if share else 3, 6, std=0.3).float(), numbers(*shape).float()
    series = {"use_cayley_neumann": terms is not None, "num_cayley_neumann_terms": terms or 5}
    module = peft.OFTRotationModule(len(entries), 6, 4, 12, block_share=share, **series)
    module.weight.data = entries
    expected = (weight.flatten(1) @ module.get_weight().T).detach().reshape(shape)
    factors = built(wa.OftIn, blocks=entries, share=share, neumann_terms=terms)
    close(weight + delta(factors, weight), expected, 1e-5)
    close(weight + change(factors, weight, 0.4), 0.6 * weight + 0.4 * expected, 1e-5)


def test_scaled_oft_divides_its_entries() -> None:
    entries, weight = numbers(3, 6), numbers(7, 12)
    scaled = built(wa.OftIn, blocks=entries, spread=torch.ones(1), neumann_terms=5)
    plain = built(wa.OftIn, blocks=entries / (2 * math.sqrt(3)), neumann_terms=5)
    close(delta(scaled, weight), delta(plain, weight))


@pytest.mark.parametrize(("stages", "count", "size"), [(1, 4, 3), (2, 6, 2), (3, 4, 4)])
@pytest.mark.parametrize("kernel", [(), (2, 1)])
def test_boft_on_inputs_as_peft(stages: int, count: int, size: int, kernel: Shape) -> None:
    layer = pytest.importorskip("peft.tuners.boft.layer").BOFTLayer
    width = count * size
    blocks, scale = numbers(stages, count, size, size).float(), numbers(7, 1).float()
    weight = numbers(7, width // math.prod(kernel), *kernel).float()
    whole = torch.eye(width)
    for stage in range(stages):
        order = layer.block_butterfly_perm(None, width, count // 2**stage, size // 2, stages - 1)
        swap = layer.perm2mat(None, order)
        whole = swap @ torch.block_diag(*layer.cayley_batch(None, blocks[stage])) @ swap.T @ whole
    expected = ((whole @ weight.flatten(1).T).T * scale).reshape(weight.shape)
    for layout in ((7, 1), (1, 7)):
        factors = built(wa.BoftIn, blocks=blocks, out_scale=scale.reshape(layout))
        close(weight + delta(factors, weight), expected, 1e-4)
        close(weight + change(factors, weight, 0.4), 0.6 * weight + 0.4 * expected, 1e-4)


def one_of_each() -> dict[str, Factors]:
    """For a weight of (8, 6)."""
    up, down = numbers(8, 3), numbers(3, 6)
    return {
        "lora": built(wa.Lora, up=up, down=down, alpha=2.0),
        "dora": built(wa.Lora, up=up, down=down, magnitude=Magnitude(pack(numbers(1, 6)), "in")),
        "loha": built(wa.Loha, w1_a=up, w1_b=down, w2_a=up, w2_b=down),
        "lokr": built(wa.Lokr, w1=numbers(4, 2), w2=numbers(2, 3)),
        "vera": built(wa.Vera, up=up, down=down, lambda_b=numbers(8), lambda_d=numbers(3)),
        "glora": built(wa.Glora, a1=numbers(6, 3), a2=numbers(3, 6), b1=up, b2=down),
        "ia3": built(wa.Ia3, vector=numbers(6), on_input=True, convention="factor"),
        "oft": built(wa.Oft, blocks=numbers(4, 2, 2)),
        "boft": built(wa.Boft, blocks=numbers(2, 4, 2, 2)),
        "oft_in": built(wa.OftIn, blocks=numbers(2, 3)),
        "boft_in": built(wa.BoftIn, blocks=numbers(1, 3, 2, 2), out_scale=numbers(8)),
        "full": built(wa.Full, value=numbers(8, 6)),
        "set": built(wa.Full, value=numbers(8, 6), mode="set"),
    }


EACH, K3 = sorted(one_of_each()), (8, 6, 3, 3)


@pytest.mark.parametrize("name", EACH)
def test_laws(name: str) -> None:
    factors, weight = one_of_each()[name], numbers(8, 6)
    full = delta(factors, weight)
    assert full.dtype == torch.float64
    close(delta(dataclasses.replace(factors, transposed=True), weight.T), full.T)
    assert name == "set" or not change(factors, weight, 0.0).any()
    close(delta(factors, weight.bfloat16()), delta(factors, weight.bfloat16().double()).float(), 1e-4)
    small, wide = weight[:7, :4], torch.zeros(8, 6, dtype=torch.float64)
    wide[:7, :4] = small
    close(delta(dataclasses.replace(factors, widen=(8, 6)), small), delta(factors, wide))
    turned = dataclasses.replace(factors, widen=(6, 8), transposed=True)
    close(delta(turned, small.T), delta(factors, wide).T)


@pytest.mark.parametrize("name", EACH)
def test_only_additive_algorithms_do_without_the_weight(name: str) -> None:
    factors, weight = one_of_each()[name], numbers(8, 6).float()
    turned = dataclasses.replace(factors, transposed=True, widen=(6, 8))
    for absent in (None, weight.to("meta")):
        if factors.needs_base():
            with pytest.raises(TargetError, match="base weight"):
                delta(factors, absent)
        else:
            assert torch.equal(delta(factors, absent), delta(factors, weight))
            assert torch.equal(delta(turned, None), delta(factors, weight).T)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("shape", [(7, 6), (8, 7), (6, 8), K3, (8,)])
def test_a_misfit_names_both_shapes(name: str, shape: Shape) -> None:
    factors = one_of_each()[name]
    fits = {"oft": "out", "boft": "out", "oft_in": "in", "ia3": "channel"}.get(name)
    if (fits, shape) in {("out", (8, 7)), ("in", (7, 6)), ("channel", (7, 6)), ("out", K3), ("channel", K3)}:
        assert delta(factors, numbers(*shape)).shape == shape
        return
    with pytest.raises(TargetError, match=r"expected .*\d.*, got .*\d"):
        delta(factors, numbers(*shape))


def test_other_misfits() -> None:
    lora = built(wa.Lora, up=numbers(7, 2, 1, 1), down=numbers(2, 5, 3, 1))
    for shape in ((7, 5, 1, 3), (15, 7)):
        with pytest.raises(TargetError, match=rf"expected {re.escape(str(shape))}, got \(7, 5, 3, 1\)"):
            delta(lora, numbers(*shape))
    for up in (numbers(7, 3), numbers(7, 4, 2, 1)):
        with pytest.raises(TargetError, match=r"up \(7, \d\).*got \(4, 5\)"):
            delta(built(wa.Lora, up=up, down=numbers(4, 5)), numbers(7, 5))
    with pytest.raises(TargetError, match="w1"):
        delta(built(wa.Lokr, w2=numbers(2, 2)), numbers(4, 4))
    with pytest.raises(TargetError, match=r"stage 1.*multiple of 8"):
        delta(built(wa.Boft, blocks=numbers(2, 3, 4, 4)), numbers(12, 5))
    dora_oft = built(wa.Oft, blocks=numbers(3, 4, 4), magnitude=Magnitude(pack(numbers(12)), "out"))
    with pytest.raises(TargetError, match="magnitude"):
        delta(dora_oft, numbers(12, 5))


def test_padded() -> None:
    weight = numbers(2, 3, 1)
    expected = torch.zeros(4, 3, 2, dtype=torch.float64)
    expected[:2, :3, :1] = weight
    assert torch.equal(padded(weight, (4, 3, 2)), expected)
    assert padded(weight, None) is weight
    for smaller in ((1, 3, 1), (2, 3)):
        with pytest.raises(TargetError, match="widen"):
            padded(weight, smaller)
