"""Optimizers over flat parameters: against torch's own, gated, saved and restored."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load, save
from torch import nn

from inweave.errors import ConfigError, FormatError
from inweave.training.optim.adamw import Optimizer, make_optimizer
from inweave.training.optim.ema import Ema
from inweave.training.optim.flat import FlatParameters
from tests.unit.training.tiny import OPTIMIZERS

EPS = torch.finfo(torch.float32).eps
SHAPES = {"a": (16, 40), "b": (70, 16), "c": (33,), "d": (8, 4, 3, 3)}
GROUPS = {"b": 16.0, "c": 0.25}
LR, ONE, YES, NO = torch.tensor(1e-2), torch.tensor(1.0), torch.tensor(True), torch.tensor(False)
PACKAGES = {"prodigy": "prodigyopt", "schedulefree": "schedulefree"}


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(named_parameters: dict[str, nn.Parameter], steps: int, seed: int = 1) -> Iterator[None]:
    """Set the same random gradients, of very different sizes, on every call."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for number, (name, shape) in enumerate(SHAPES.items()):
            named_parameters[name].grad.copy_(torch.randn(shape, generator=generator) * 10.0 ** (-2 * number))
        yield


def spoil(flat: FlatParameters, bad: float) -> None:
    for parameter in flat.parameters.values():
        parameter.grad.fill_(bad)


def built(name: str, groups: dict[str, float] | None = None, **options: Any) -> tuple[FlatParameters, Optimizer]:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    flat = FlatParameters(parameters(), groups)
    return flat, make_optimizer(name, flat, **{"weight_decay": 0.1, **options})


def snapshot(flat: FlatParameters, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {"values": flat.values.clone(), **{name: tensor.clone() for name, tensor in optimizer.state().items()}}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    bits = {torch.float32: torch.int32}  # so that -0.0 and 0.0 differ
    return one.keys() == two.keys() and all(
        torch.equal(a.view(bits.get(a.dtype, a.dtype)), two[n].view(bits.get(a.dtype, a.dtype))) for n, a in one.items()
    )


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("groups", [{}, GROUPS])
def test_adamw_is_torch_adamw(groups: dict[str, float], decay: float, betas: tuple[float, float]) -> None:
    flat, optimizer = built("adamw", groups, weight_decay=decay, betas=betas)
    theirs = parameters()
    peer = torch.optim.AdamW(
        [{"params": [p], "lr": float(LR) * groups.get(name, 1.0)} for name, p in theirs.items()],
        betas=betas, weight_decay=decay,
    )  # fmt: skip
    for p in theirs.values():
        p.grad = torch.zeros_like(p)
    for _ in zip(gradients(flat.parameters, 50), gradients(theirs, 50), strict=True):
        optimizer.step(LR, ONE, YES)
        peer.step()
    for name, parameter in flat.parameters.items():
        # per step: x is rounded at most twice; the step itself, about lr, is off by the roundings that make it up
        bound = 50 * EPS * (2 * theirs[name].abs().max() + 16 * float(LR) * groups.get(name, 1.0))
        assert (parameter - theirs[name]).abs().max() <= bound, name


def test_padding_stays_zero_and_large_buffers_are_processed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from inweave.training.optim import flat as flat_module

    results = []
    for rows in (1 << 14, 3):
        monkeypatch.setattr(flat_module, "ROWS", rows)
        flat, optimizer = built("adamw", GROUPS)
        ema = Ema(flat, 0.5)
        for _ in gradients(flat.parameters, 3):
            optimizer.step(LR, ONE, YES)
            ema.update(YES)
        results.append({**snapshot(flat, optimizer), "ema": ema.values})
        inside = torch.zeros(flat.values.numel(), dtype=torch.bool)
        for segment, _ in flat.segments.values():
            inside[segment] = True
        assert (flat.values[~inside] == 0).all()
    assert same(*results)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_not_ok_changes_no_bit(name: str) -> None:
    flat, optimizer = built(name)
    for _ in gradients(flat.parameters, 3):
        optimizer.step(LR, ONE, YES)
    if name == "adamw":
        optimizer.state()["m"][::7] = -0.0
    before = snapshot(flat, optimizer)
    for bad in (float("nan"), float("inf"), 1.0):
        spoil(flat, bad)
        optimizer.step(LR, torch.tensor(bad), NO)
        assert same(before, snapshot(flat, optimizer))
    for _ in gradients(flat.parameters, 1, seed=5):
        optimizer.step(LR, ONE, YES)
    assert not same(before, snapshot(flat, optimizer)) and flat.values.isfinite().all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_first_step_leaves_no_trace(name: str) -> None:
    results = []
    for skipped in (True, False):
        flat, optimizer = built(name)
        if skipped:
            spoil(flat, float("nan"))
            optimizer.step(LR, ONE, NO)
        for _ in gradients(flat.parameters, 3):
            optimizer.step(LR, ONE, YES)
        results.append(snapshot(flat, optimizer))
    assert same(*results)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("groups", [{}, GROUPS])
def test_restored_from_a_file_it_continues_bit_for_bit(name: str, groups: dict[str, float]) -> None:
    if name == "prodigy" and groups:
        with pytest.raises(ConfigError, match="multipliers"):
            built(name, groups)
        return
    flat, optimizer = built(name, groups)
    for count, _ in enumerate(gradients(flat.parameters, 12)):
        optimizer.step(LR * (1 + count), torch.tensor(0.5), YES)
        if count == 6:
            files = save(flat.state()), save({n: t.contiguous() for n, t in optimizer.state().items()})
    again, other = built(name, groups)
    for _ in gradients(again.parameters, 2, seed=9):
        other.step(LR, ONE, YES)  # whatever it holds already is replaced
    again.load(load(files[0]))
    other.load(load(files[1]))
    for count, _ in enumerate(gradients(again.parameters, 12)):
        if count > 6:
            other.step(LR * (1 + count), torch.tensor(0.5), YES)
    assert same(snapshot(flat, optimizer), snapshot(again, other))
    fresh, third = built(name, groups)
    fresh.load(load(files[0]))
    third.load(load(files[1]))
    for count, _ in enumerate(gradients(fresh.parameters, 12)):
        if count > 6:
            third.step(LR * (1 + count), torch.tensor(0.5), YES)
    assert same(snapshot(flat, optimizer), snapshot(fresh, third))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_of_other_parameters_or_another_optimizer_is_refused(name: str) -> None:
    _, optimizer = built(name)
    other = FlatParameters(dict(reversed(parameters().items())))
    with pytest.raises(FormatError, match="other parameters"):
        make_optimizer(name, other).load(optimizer.state())
    _, peer = built("adafactor" if name != "adafactor" else "adamw")
    with pytest.raises(FormatError):
        peer.load(optimizer.state())


@pytest.mark.parametrize(
    "option", [{"d_denom": "1"}, {"d_hat": None}, {"params": [0, 0, 0, 0]}, {"d_other": 1.0}, {"k": True}]
)
def test_a_saved_option_that_the_optimizer_does_not_write_is_refused(option: dict[str, Any]) -> None:
    flat, optimizer = built("prodigy")
    for _ in gradients(flat.parameters, 1):
        optimizer.step(LR, ONE, YES)
    state = optimizer.state()
    numbers = json.loads(bytes(state["numbers"].tolist()))
    assert {"d_denom", "d_hat"} <= numbers["groups"][0].keys(), "what its first step adds"
    numbers["groups"][0].update(option)
    changed = torch.tensor(list(json.dumps(numbers).encode()), dtype=torch.uint8)
    fresh, other = built("prodigy")
    before = snapshot(fresh, other)
    with pytest.raises(FormatError, match=f"the saved option '{next(iter(option))}'"):
        other.load({**state, "numbers": changed})
    assert same(before, snapshot(fresh, other)), "a refused state changes nothing"


def test_state_of_8_bits_is_a_quarter() -> None:
    sizes = {}
    for name in ("adamw", "adamw8bit"):
        flat = FlatParameters({"w": nn.Parameter(torch.zeros(1000, 1000))})
        state = make_optimizer(name, flat).state()
        sizes[name] = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert sizes["adamw8bit"] <= 0.3 * sizes["adamw"]


@pytest.mark.parametrize("groups", [{}, GROUPS])
def test_adamw8bit_uses_the_per_module_learning_rates(groups: dict[str, float]) -> None:
    (one, eight), (two, full) = built("adamw8bit", groups), built("adamw", groups)
    for _ in zip(gradients(one.parameters, 1), gradients(two.parameters, 1), strict=True):
        eight.step(LR, ONE, YES)
        full.step(LR, ONE, YES)
    assert ((one.values - two.values).abs() <= EPS * (2 * two.values.abs() + 16 * 16 * LR)).all()


def test_schedulefree_evaluates_the_average_and_continues() -> None:
    pytest.importorskip("schedulefree")
    flat, optimizer = built("schedulefree", weight_decay=0.0)
    start = flat.values.clone()
    for _ in gradients(flat.parameters, 20):
        optimizer.step(LR, ONE, YES)
    before = snapshot(flat, optimizer)
    with pytest.raises(KeyError), optimizer.eval_weights():
        for name, parameter in flat.parameters.items():
            y, z = before["values"][flat.segments[name].place], before[f"{name}:z"].flatten()
            x = (y - (1 - 0.9) * z) / 0.9  # y = (1 - beta1) z + beta1 x
            torch.testing.assert_close(parameter.detach().flatten(), x, rtol=1e-5, atol=1e-6)
        assert not torch.equal(flat.values, start)
        with pytest.raises(ConfigError, match="outside"):
            optimizer.state()
        raise KeyError
    assert same(before, snapshot(flat, optimizer))
    for _ in gradients(flat.parameters, 1):
        optimizer.step(LR, ONE, YES)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_reports_whether_its_step_can_be_captured(name: str) -> None:
    _, optimizer = built(name)
    assert optimizer.capturable is (name in ("adamw", "adamw8bit"))
    assert bool(optimizer.capture_problem) is not optimizer.capturable


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_missing_library_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(ConfigError, match=r"pip install 'inweave\[train\]'"):
        make_optimizer(name, FlatParameters(parameters()))


def test_options_that_mean_nothing_are_refused() -> None:
    flat = FlatParameters(parameters())
    with pytest.raises(ConfigError) as caught:
        make_optimizer("sgd", flat, weight_decay=-1.0, betas=(0.9, 1.0), epsilon=0.0)
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match="'d0'"):
        make_optimizer("adamw", flat, args={"d0": 1.0})
    with pytest.raises(ConfigError, match="warp"):
        make_optimizer("adafactor", flat, args={"warp": 1.0})


def test_adafactor_can_take_steps_of_the_learning_rate_itself() -> None:
    """With scale_parameter off a parameter of zeros moves as far as any other, as other libraries' Adafactor does."""
    moved = {}
    for scaled in (True, False):
        flat = FlatParameters({"a": torch.nn.Parameter(torch.zeros(4, 4))})
        optimizer = make_optimizer("adafactor", flat, args={"scale_parameter": scaled})
        flat.grads.fill_(0.5)
        one = torch.ones(())
        optimizer.step(torch.tensor(0.01), one, one)
        moved[scaled] = float(flat.parameters["a"].detach().abs().max())
    assert moved[False] == pytest.approx(0.01) and moved[True] == pytest.approx(1e-5)


def test_adafactor_at_a_rate_of_one_hundredth_chooses_its_own_as_transformers_does() -> None:
    """relative_step=True there is min(0.01, 1 / sqrt(step)); after step 10,000 the second counts."""
    transformers = pytest.importorskip("transformers")
    start = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    flat = FlatParameters({"a": torch.nn.Parameter(start.clone())})
    ours = make_optimizer("adafactor", flat, learning_rate=0.01, weight_decay=0.0)
    theirs = torch.nn.Parameter(start.clone())
    reference = transformers.optimization.Adafactor([theirs], lr=None, scale_parameter=True, relative_step=True)
    one = torch.ones(())
    for number in range(60):
        gradient = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 + number))
        theirs.grad = gradient.clone()
        flat.grads.zero_()
        flat.grads[: gradient.numel()] = gradient.flatten()
        reference.step()
        ours.step(torch.tensor(0.01), one, one)
        if number == 30:  # as late in a long run
            for optimizer in (reference, ours._inner):  # type: ignore[attr-defined]
                (state,) = optimizer.state.values()
                state["step"] = state["step"] * 0 + 20_000
    torch.testing.assert_close(flat.parameters["a"].detach(), theirs.detach(), rtol=1e-4, atol=1e-5)
