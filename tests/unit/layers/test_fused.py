"""Linear layers fused with their LoRAs, here on the CPU: the same numbers as the general path, never stale ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from inweave import inject
from inweave.layers import fused, lora_layers
from inweave.layers.layer import LoraLayer
from inweave.ops.kinds import LinearKind
from inweave.ops.linear import Rounded

WIDTH = 8


@pytest.fixture(autouse=True)
def fused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))
    torch._dynamo.reset()  # torch gives up on a function that was compiled for many shapes


def network(*names: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH, bias=False)).to(dtype)
    for at, name in enumerate(names):
        inject(model, 2 + at, 3.0, ["0", "2"], name=name, **options)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return model


def layers(model: nn.Module) -> list[LoraLayer]:
    return list(lora_layers(model).values())


def general(
    model: nn.Module, work: Callable[[], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(fused, "DEVICES", frozenset())
        return work()


def is_fused(layer: LoraLayer, x: torch.Tensor) -> bool:
    return layer.operation.output(x, layer._acting, layer.training) is not None


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DTYPES", (*fused.DTYPES, torch.float64))


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")])
def test_one_and_several_adapters_give_what_the_general_path_gives(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(*names)
    for layer in layers(model):
        layer.set_strength("a", 0.3)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]

    def with_gradients() -> list[torch.Tensor]:
        y = model(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    def without() -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(x)]

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def in_a_compiled_region() -> list[torch.Tensor]:
        y = compiled(x)
        grads = torch.autograd.grad(y.square().sum(), leaves)
        with torch.no_grad():
            return [y.detach(), *grads, compiled(x)]

    assert is_fused(layers(model)[0], x)
    for work in (without, with_gradients, in_a_compiled_region, without):
        expected = general(model, with_gradients, monkeypatch)
        for ours, theirs in zip(work(), [*expected, expected[0]], strict=False):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_kept_factors_follow_every_change() -> None:
    model = network("a", "b").requires_grad_(False)
    layer, x = layers(model)[0], torch.randn(3, WIDTH, dtype=torch.float64)

    @torch.no_grad()
    def expected() -> torch.Tensor:
        acting: Iterable[tuple[Any, float]] = layer._acting
        change = sum(strength * branch.scale * branch.up @ branch.down for branch, strength in acting)
        return nn.functional.linear(x, layer.weight + change, layer.bias)

    def check() -> object:
        with torch.no_grad():
            y = layer(x)
        torch.testing.assert_close(y, expected(), rtol=1e-12, atol=1e-12)
        return layer.operation.plan

    first = check()
    assert first is not None and check() is first, "kept while nothing changes"
    changes: list[Callable[[], object]] = [
        lambda: layer.branch("a").up.mul_(2),
        lambda: layer.branch("b").load_state_dict(
            {name: value + 1 for name, value in layer.branch("b").state_dict().items()}
        ),
        lambda: layer.set_strength("a", -1.5),
        lambda: setattr(layer.branch("a").down, "data", layer.branch("a").down.data * 3),
        lambda: layer.activate(["b"]),
        lambda: layer.activate({"a": 0.5, "b": 2.0}),
        lambda: layer.enable(False),
        lambda: layer.enable(True),
    ]
    for change in changes:
        with torch.no_grad():
            change()
        check()
    layer.merge()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    layer.unmerge()
    check()


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_changes_from_outside_are_seen_by_the_next_pass(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(*names).requires_grad_(False).eval()
    layer, x = layers(model)[0], torch.randn(2, 3, WIDTH, dtype=torch.float64)
    branch: Any = layer.branch("a")
    base: Any = layer.base

    def run(inputs: torch.Tensor = x) -> torch.Tensor:
        with torch.no_grad():
            return layer(inputs)

    def check() -> None:
        expected = general(model, lambda: [run()], monkeypatch)[0]
        for _ in range(2):
            torch.testing.assert_close(run(), expected, rtol=1e-12, atol=1e-12)

    check()
    assert is_fused(layer, x)
    changes: list[Callable[[], object]] = [
        lambda: branch.up.mul_(2),
        lambda: setattr(branch, "scale", 7.0),
        lambda: setattr(branch, "up", nn.Parameter(branch.up * 3, requires_grad=False)),
        lambda: setattr(base, "weight", nn.Parameter(base.weight * 3, requires_grad=False)),
        lambda: setattr(base, "bias", None),
        lambda: layer.set_strength("a", -0.25),
        lambda: setattr(branch, "magnitude", nn.Parameter(branch.up.sum(1).abs(), requires_grad=False)),
        lambda: setattr(branch, "magnitude", None),
        lambda: base.register_forward_hook(lambda module, inputs, output: output + 1),
    ]
    for change in changes:
        change()
        check()
    model.float()
    base._forward_hooks.clear()
    assert run(x.float()).dtype == torch.float32


def test_nothing_is_kept_of_what_may_be_trained() -> None:
    model = network("a", "b").requires_grad_(False)
    layer, x = layers(model)[0], torch.randn(3, WIDTH, dtype=torch.float64)
    buffer = torch.zeros(100, dtype=torch.float64)  # a trainer's: the parameter's version does not tell of its changes
    up = layer.branch("a").get_parameter("up")
    view = buffer[: up.numel()].view(up.shape)
    view.copy_(up)
    up.data = view
    with torch.no_grad():
        before = layer(x)
        buffer.mul_(2)
        after = layer(x)
    assert layer.operation.plan is None and not torch.equal(before, after)

    other = network("a", "b")
    layer = layers(other)[0]
    with torch.no_grad():
        layer(x)
    assert layer.operation.plan is not None
    layer(x).sum().backward()
    with torch.no_grad():
        layer(x)
    assert layer.operation.plan is None


def test_factors_of_another_dtype_are_rounded_once() -> None:
    model = network("a", dtype=torch.bfloat16).requires_grad_(False)
    layer, x = layers(model)[0], torch.randn(3, WIDTH).bfloat16()
    branch = layer.branch("a").float()
    with torch.no_grad():
        first_output = layer(x)
        assert layer.operation.plan is not None and layer.operation.plan.down.dtype == torch.bfloat16
        branch.bfloat16()
        assert torch.equal(layer(x), first_output)


@pytest.mark.parametrize("gradients", [False, True])
def test_several_adapters_of_small_scale_keep_their_digits(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's alpha is often 1 at rank 128: float16 cannot hold its factor times alpha / rank."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).half()
    nn.init.zeros_(model.get_parameter("0.weight"))
    for name in ("a", "b"):
        inject(model, 32, 0.25, ["0"], name=name)
    (layer,) = layers(model)
    for name in ("a", "b"):
        nn.init.normal_(layer.branch(name).get_parameter("down"), std=0.2)
        nn.init.normal_(layer.branch(name).get_parameter("up"), std=5e-4)
    layer.set_strength("b", 0.5)
    x = torch.randn(32, 64).half()
    acting: Iterable[tuple[Any, float]] = layer.acting
    exact = sum(
        strength * branch.scale * (x.double() @ branch.down.double().T @ branch.up.double().T)
        for branch, strength in acting
    )
    with torch.set_grad_enabled(gradients):
        assert is_fused(layer, x)
        ours, (plain,) = layer(x), general(model, lambda: [layer(x)], monkeypatch)
        error, usual = ((y.detach() - exact.detach()).norm() for y in (ours, plain))
    assert float(error) < 2 * float(usual)


def test_rounded_copies_are_used_while_they_are_there() -> None:
    model = network("a", dtype=torch.bfloat16)
    layer, x = layers(model)[0], torch.randn(3, WIDTH).bfloat16()
    branch = layer.branch("a").float()
    plain = layer(x)
    grads = {role: torch.zeros_like(factor) for role, factor in branch.roles().items()}
    branch.rounded = {
        role: Rounded(factor.detach().bfloat16() * 2, grads[role]) for role, factor in branch.roles().items()
    }
    assert not torch.equal(layer(x), plain)
    layer(x).sum().backward()
    assert branch.up.grad is None and all(bool(grad.any()) for grad in grads.values())
    with torch.no_grad():
        assert not torch.equal(layer(x), plain)
        assert torch.equal(layer(x), layer(x.clone().requires_grad_()).detach())
    branch.rounded = {}
    assert torch.equal(layer(x), plain)


def test_everything_else_takes_the_general_path() -> None:
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    assert is_fused(layers(network("a"))[0], x)
    assert not is_fused(layers(network("a", dora=True))[0], x)
    dropped = layers(network("a", dropout=0.5))[0].train()
    assert not is_fused(dropped, x) and is_fused(dropped.eval(), x)
    rates: tuple[dict[str, Any], ...] = ({"hidden_dropout": 0.5}, {"rank_dropout": 0.5})
    for rate in rates:
        hidden = layers(network("a", **rate))[0].train()
        assert not is_fused(hidden, x) and is_fused(hidden.eval(), x)
    hooked = layers(network("a"))[0]
    handle = hooked.base.register_forward_hook(lambda module, inputs, output: output + 1)
    assert not is_fused(hooked, x)
    handle.remove()
    assert is_fused(hooked, x)
    hooked.base.forward = lambda inputs: inputs  # as offloading libraries do it
    assert not is_fused(hooked, x)
    trained = layers(network("a"))[0]
    trained.weight.requires_grad_(True)
    assert not is_fused(trained, x)
    assert not is_fused(layers(network("a"))[0], x.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_fused(layers(network("a", dtype=torch.float32))[0], x.float())

    class Shifted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 2

    assert not fused.is_plain_linear(Shifted(WIDTH, 6), LinearKind())
    assert not fused.is_plain_linear(nn.Linear(WIDTH, 6), LinearKind(transposed=True))


def test_layers_of_equal_blocks_share_one_compiled_program() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network("a", dtype=torch.float32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.body(x)

    blocks = [Block() for _ in range(3)]
    counter = CompileCounter()
    x = torch.randn(3, WIDTH)
    for block in blocks:
        block.compile(backend=counter)
    for _ in range(2):
        for block in blocks:
            for layer in layers(block):
                branch = layer.branch("a")
                branch.rounded = {
                    role: Rounded(factor.detach().clone(), torch.zeros_like(factor))
                    for role, factor in branch.roles().items()
                }
            block(x).sum().backward()
    assert counter.frame_count == 1
