"""8-bit AdamW: its code books, its rounding, its steps against float32, and the kernel in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inweave.ops.adam8bit import code_book, corrections, dequantize, fresh, quantize, reference, step
from tests.unit.ops.interpreter import run_interpreted

CPU = torch.device("cpu")
EPS = torch.finfo(torch.float32).eps
SETTINGS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0}
SIZES = [1, 255, 256, 257, 5000]


def wide(size: int, seed: int) -> torch.Tensor:
    """Normal numbers times powers of ten over eight decades."""
    torch.manual_seed(seed)
    return torch.randn(size) * 10 ** (torch.rand(size) * 8 - 6)


def take(
    values: torch.Tensor,
    grads: torch.Tensor,
    moments: tuple[torch.Tensor, ...],
    count: int,
    lr: float = 1e-2,
    **other: object,
) -> None:
    options: dict[str, Any] = {**SETTINGS, "ok": torch.tensor(True), "grad_scale": torch.tensor(1.0), **other}
    step(values, grads, *moments, lr=torch.tensor(lr), count=torch.tensor(count), **options)


def test_codebooks_are_the_published_ones() -> None:
    for signed in (True, False):
        book = code_book(signed, CPU)
        assert book.shape == (256,) and book.dtype == torch.float32
        assert (book.diff() > 0).all()
        assert (book == 0).sum() == 1 and book[-1] == 1
        positive = book[book > 0][:-1]
        for decade in range(7):
            inside = positive[(positive > 10.0 ** (decade - 7)) & (positive < 10.0 ** (decade - 6))]
            assert len(inside) == 2**decade * (1 if signed else 2)
            if len(inside) > 2:
                assert inside.diff().std() <= 1e-5 * inside.max(), "evenly spaced within a decade"
    book, unsigned = code_book(True, CPU), code_book(False, CPU)
    assert torch.equal(book[book < 0], -book[book > 0][:-1].flip(0)), "mirrored, except for 1"
    assert book[book > 0][0] == pytest.approx(5.5e-7) and book[0] == pytest.approx(-0.99296875)
    assert unsigned[0] == 0 and unsigned[1] == pytest.approx(3.25e-7) and unsigned[-2] == pytest.approx(0.996484375)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed: bool) -> None:
    book = code_book(signed, CPU).double()
    share = torch.cat([torch.linspace(-1 if signed else 0, 1, 3001), torch.logspace(-8, 0, 2000)])
    share = share[: share.numel() // 255 * 255].view(-1, 255)
    share = torch.cat([torch.ones(len(share), 1), share], 1).flatten()  # a 1 in every block: the scale is 1
    codes, scales = quantize(share, signed=signed)
    assert (scales == 1).all()
    distance = (share.double()[:, None] - book).abs()
    nearest = distance.argmin(1)  # the first of equals: the lower
    if not signed:
        nearest = nearest.clamp_min(1).where(share > 0, nearest)
    assert torch.equal(codes.long(), nearest)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("signed", [True, False])
def test_quantizing_dequantized_values_changes_nothing(signed: bool, size: int) -> None:
    for seed in range(4):
        values = wide(size, seed)
        values = values if signed else values.square()
        codes, scales = quantize(values, signed=signed)
        again = quantize(dequantize(codes, scales, signed=signed), signed=signed)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


@pytest.mark.parametrize("signed", [True, False])
def test_error_is_at_most_half_a_gap_of_the_block(signed: bool) -> None:
    values = torch.cat([wide(5000, 1), torch.zeros(300), -wide(200, 2).abs()])
    values = values if signed else values.square()
    codes, scales = quantize(values, signed=signed)
    error = (dequantize(codes, scales, signed=signed) - values).abs()
    half = 0.9 / (128 if signed else 256)  # the widest gap is in the top decade
    bound = scales.abs().repeat_interleave(256)[: values.numel()] * (half + 2 * EPS)
    assert (error <= bound).all()
    for block, scale in zip(values.split(256), scales, strict=True):
        assert scale.abs() == block.abs().max()


def test_the_sign_of_the_first_moment_survives() -> None:
    values = wide(4096, 3)
    restored = dequantize(*quantize(values, signed=True), signed=True)
    large = values.abs() > 1e-6 * values.view(-1, 256).abs().amax(1).repeat_interleave(256)
    assert (values < 0).sum() > 1000 and torch.equal(restored.sign()[large], values.sign()[large])
    values, moments = torch.zeros(600), fresh(600, CPU)
    grads = torch.where(torch.arange(600) % 3 == 0, 1.0, -1.0)
    for count in range(1, 6):
        take(values, grads, moments, count)
    take(values, torch.zeros(600), moments, 6)
    assert torch.equal(values.sign(), -grads.sign()), "also by memory only"
    assert (values.abs() > 0.05).all()


def test_first_step_is_adamw() -> None:
    values, grads = wide(1000, 4), wide(1000, 5)
    plain = torch.nn.Parameter(values.clone())
    plain.grad = grads.clone()
    torch.optim.AdamW([plain], lr=1e-2, weight_decay=0.1).step()
    take(values, grads, fresh(1000, CPU), 1, weight_decay=0.1)
    # the moments start at zero, which is exact; what is left is rounding of x and of a step of size lr
    assert ((values - plain).abs() <= 2 * EPS * values.abs() + 16 * EPS * 1e-2).all()


def test_decay_is_decoupled() -> None:
    values = wide(700, 6)
    want, moments = values.clone(), fresh(700, CPU)
    for count in range(1, 4):
        take(values, torch.zeros(700), moments, count, weight_decay=0.5)
        want = want * (1 - torch.tensor(1e-2) * 0.5)
    assert torch.equal(values, want)
    assert not any(moment.any() for moment in moments[1:]), "decay leaves no trace in the moments"


def test_a_small_gradient_next_to_a_large_one_takes_no_giant_step() -> None:
    """Its second moment is too small for its block's codes; as 0 it would let the step grow without bound."""
    values, moments, grads = torch.zeros(256), fresh(256, CPU), torch.full((256,), 1e-4)
    grads[7] = 1.0
    for count in range(1, 30):
        before = values.clone()
        take(values, grads if count < 20 else grads * (grads == 1), moments, count)
        assert (values - before).abs().max() <= 1.1e-2
    assert (values < 0).all()


@pytest.mark.parametrize("size", SIZES)
def test_not_ok_changes_no_bit(size: int) -> None:
    values, moments = wide(size, 7), fresh(size, CPU)
    take(values, wide(size, 8), moments, 1)
    copies = [tensor.clone() for tensor in (values, *moments)]
    for ok in (torch.tensor(False), torch.tensor(0.0), torch.tensor(0)):
        take(values, torch.full((size,), float("nan")), moments, 2, ok=ok)
        assert all(torch.equal(a, b) for a, b in zip(copies, (values, *moments), strict=True))
    take(values, wide(size, 8), moments, 2, ok=torch.tensor(1.0))
    assert not torch.equal(values, copies[0])


def test_rate_per_block_and_gradient_scale() -> None:
    values, grads = wide(600, 9), wide(600, 10)
    rates = torch.tensor([1e-2, 0.0, 3e-3])
    whole, moments = values.clone(), fresh(600, CPU)
    options: dict[str, Any] = {**SETTINGS, "ok": torch.tensor(True), "grad_scale": torch.tensor(0.25)}
    step(whole, grads * 4, *moments, lr=rates, count=torch.tensor(1), **options)
    for i, part in enumerate(torch.arange(600).split(256)):
        single, own = values[part].clone(), fresh(len(part), CPU)
        take(single, grads[part], own, 1, lr=float(rates[i]))
        assert torch.equal(own[0], moments[0][part]) and torch.equal(own[2], moments[2][part])
        assert own[1] == moments[1][i] and own[3] == moments[3][i]
        # a root may differ in its last place where it lies elsewhere in a vector: see `interpreted`
        assert ((single - whole[part]).abs() <= EPS * (5 * (values[part] - single).abs() + single.abs())).all()
    assert torch.equal(whole[256:512], values[256:512])


def test_state_is_a_quarter_of_float32() -> None:
    for size in (1_000_000, 999_999):
        spent = sum(tensor.numel() * tensor.element_size() for tensor in fresh(size, CPU))
        assert spent <= 0.3 * 8 * size
        assert spent / (8 * size) == pytest.approx(2.03125 / 8, rel=1e-3)


def test_loss_follows_float32_on_a_regression() -> None:
    torch.manual_seed(0)
    x, hidden = torch.randn(512, 32), torch.randn(32, 48) / 6
    y = (x @ hidden).tanh() + 0.3 * torch.randn(512, 48)
    start = torch.randn(32 * 48 + 48 * 48) * 0.1

    def loss_of(flat: torch.Tensor) -> torch.Tensor:
        return ((x @ flat[: 32 * 48].view(32, 48)).tanh() @ flat[32 * 48 :].view(48, 48) - y).square().mean()

    plain = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([plain], lr=5e-3, weight_decay=0.01)
    ours, moments = start.clone().requires_grad_(), fresh(start.numel(), CPU)
    curves: list[tuple[float, float]] = []
    for count in range(1, 301):
        optimizer.zero_grad()
        losses = loss_of(plain), loss_of(ours)
        losses[0].backward()
        optimizer.step()
        (grad,) = torch.autograd.grad(losses[1], ours)
        take(ours.data, grad, moments, count, lr=5e-3, weight_decay=0.01)
        curves.append((losses[0].item(), losses[1].item()))
    assert curves[-1][0] < 0.5 * curves[0][0]
    assert max(abs(b / a - 1) for a, b in curves) <= 0.03
    assert abs(curves[-1][1] / curves[-1][0] - 1) <= 0.01


def interpreted() -> dict[int, list[str]]:
    """What the other process runs: kernel and reference side by side; returns what differs by more than it may.

    Moments, codes and scales are made by additions, products, quotients and comparisons, which IEEE 754 rounds the same
    way everywhere: equal bits. A root is correctly rounded in the interpreter, but on x86-64 torch takes it from MKL,
    which promises one unit in the last place. It enters a step's change alone, |x c - x'|:

        root EPS, times 1 / sqrt(1 - beta2^t) EPS, plus epsilon EPS, quotient EPS, times the rate EPS   5 EPS |x c - x'|
        x c, from values that differ already, and the difference: one rounding each                      2 EPS |x'|
    """
    from inweave.ops.adam8bit import triton as kernel

    names = ("m_codes", "m_scales", "v_codes", "v_scales")
    rows = {}
    for size in SIZES:
        ours, plain = ([wide(size, 11), *fresh(size, CPU)] for _ in range(2))
        room = torch.zeros(size)
        for count in range(1, 9):
            rate = torch.rand(-(-size // 256) if count % 2 else ()) * 1e-2
            ok = torch.tensor(count != 5)
            grads = wide(size, count) if ok else torch.full((size,), float("inf"))
            options: dict[str, Any] = {**SETTINGS, "weight_decay": 0.1}
            options["inverse"] = corrections(torch.tensor(count), 0.9, 0.999)
            options |= {"lr": rate, "ok": ok, "grad_scale": torch.tensor(0.7)}
            before = plain[0].clone()
            reference.step(plain[0], grads, *plain[1:], **options)
            kernel.step(ours[0], grads, *ours[1:], **options, rows=2 ** (count % 4), coarse=count % 5)
            if ok:
                each = rate if rate.dim() == 0 else rate.repeat_interleave(256)[:size]
                room += EPS * (
                    5 * (before * (1 - each * 0.1) - plain[0]).abs() + 2 * torch.maximum(before.abs(), plain[0].abs())
                )
        rows[size] = [name for name, a, b in zip(names, ours[1:], plain[1:], strict=True) if not torch.equal(a, b)]
        rows[size] += ["values"] * bool(((ours[0] - plain[0]).abs() > room).any())
    return rows


def test_kernel_agrees_with_the_reference_in_the_interpreter() -> None:
    rows = run_interpreted(__name__)
    assert rows == {str(size): [] for size in SIZES}, "codes and scales bit for bit, values within a few roundings"
