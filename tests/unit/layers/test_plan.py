"""The cached plans of linear layers for inference: valid until something changes, with the bits of a first pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from inweave import inject
from inweave.layers import fused, lora_layers
from inweave.layers.layer import LoraLayer
from inweave.layers.plan import InferencePlan
from inweave.ops.linear import Rounded
from inweave.ops.quantized.fp8 import Fp8Linear

INTO, OUT = 16, 24


@pytest.fixture(autouse=True)
def fused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))
    torch._dynamo.reset()


def lora_layer(count: int, factors: torch.dtype = torch.float32, dtype: torch.dtype = torch.float32) -> LoraLayer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INTO, OUT)).to(dtype)
    for at in range(count):
        inject(model, 2 + at, 3.0, ["0"], name="abc"[at])
    (layer,) = lora_layers(model).values()
    for branch in layer.adapters.values():
        for parameter in branch.to(factors).parameters():
            nn.init.normal_(parameter)
    return layer.requires_grad_(False).eval()


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, INTO, generator=torch.Generator().manual_seed(1)).to(dtype)


def plan_of(layer: LoraLayer) -> InferencePlan:
    plan = layer.operation.plan
    assert isinstance(plan, InferencePlan)
    return plan


def holds(plan: InferencePlan, layer: LoraLayer, x: torch.Tensor) -> bool:
    with torch.no_grad():
        return plan.output(x, layer._acting, layer.training) is not None


def first_output(layer: LoraLayer, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a copy, which has no cached plan."""
    other = copy.deepcopy(layer)
    assert other.operation.plan is None
    with torch.no_grad():
        return other(x)


@pytest.fixture(params=[(1, "float32"), (1, "bfloat16"), (3, "float32")], ids=["views", "rounded", "stacked"])
def layer(request: pytest.FixtureRequest) -> LoraLayer:
    """A layer that has a plan."""
    count, factors = request.param
    layer, x = lora_layer(count, getattr(torch, factors)), inputs()
    with torch.no_grad():
        outputs = [layer(x) for _ in range(3)]
    assert all(torch.equal(y, first_output(layer, x)) for y in outputs)
    assert plan_of(layer).are_copies == ((count, factors) != (1, "float32"))
    assert holds(plan_of(layer), layer, x)
    return layer


def replaced(parameter: Any) -> nn.Parameter:
    return nn.Parameter(parameter.detach() * 3, requires_grad=False)


def last(layer: LoraLayer) -> Any:
    return layer.branch(layer.active[-1])


def swap_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 3


def cut_rank(layer: LoraLayer, *roles: str) -> None:
    """Cut the rank to one, at the same address."""
    for role in roles:
        factor = last(layer)._parameters[role]
        factor.data = factor.data[:, :1] if role == "up" else factor.data[:1]
    last(layer).rank = 1 if len(roles) == 2 else last(layer).rank


CHANGES: dict[str, Callable[[LoraLayer], object]] = {
    "weight replaced": lambda layer: setattr(layer.base, "weight", replaced(layer.base.weight)),
    "bias replaced": lambda layer: setattr(layer.base, "bias", replaced(layer.base.bias)),
    "bias removed": lambda layer: setattr(layer.base, "bias", None),
    "weight trained": lambda layer: layer.base.weight.requires_grad_(True),
    "bias trained": lambda layer: layer.base.bias.requires_grad_(True),
    "hook": lambda layer: layer.base.register_forward_hook(lambda module, x, y: y + 1),
    "hook before": lambda layer: layer.base.register_forward_pre_hook(lambda module, x: (x[0] + 1,)),
    "hook backward": lambda layer: layer.base.register_full_backward_hook(lambda module, dx, dy: None),
    "hook before backward": lambda layer: layer.base.register_full_backward_pre_hook(lambda module, dy: None),
    "other hooks": lambda layer: setattr(layer.base, "_forward_hooks", {0: lambda module, x, y: y + 1}),
    "forward": lambda layer: setattr(layer.base, "forward", type(layer.base)(INTO, OUT).requires_grad_(False).forward),
    "8 bits": lambda layer: Fp8Linear.quantize(layer.base),  # type: ignore[arg-type]
    "down replaced": lambda layer: setattr(last(layer), "down", replaced(last(layer).down)),
    "up replaced": lambda layer: setattr(last(layer), "up", replaced(last(layer).up)),
    "other parameters": lambda layer: setattr(
        last(layer), "_parameters", last(layer)._parameters | {"up": replaced(last(layer).up)}
    ),
    "down written": lambda layer: last(layer).down.mul_(2),
    "up written": lambda layer: last(layer).up.mul_(2),
    "data of down": lambda layer: swap_data(last(layer).down),
    "data of up": lambda layer: swap_data(last(layer).up),
    "rank": lambda layer: cut_rank(layer, "down", "up"),
    "magnitude": lambda layer: setattr(last(layer), "magnitude", nn.Parameter(torch.rand(OUT), requires_grad=False)),
    "scale": lambda layer: setattr(last(layer), "scale", 7.0),
    "strength": lambda layer: layer.set_strength(layer.active[-1], 0.3),
    "activation": lambda layer: layer.activate(layer.active[:-1]),
    "disabled": lambda layer: layer.enable(False),
    "merged": lambda layer: layer.merge(),
    "deleted": lambda layer: layer.delete(layer.active[-1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_plan_holds_after_a_change(layer: LoraLayer, change: str) -> None:
    x, plan = inputs(), plan_of(layer)
    with torch.no_grad():
        before = layer(x)
        CHANGES[change](layer)
        assert not holds(plan, layer, x)
        expected = first_output(layer, x)
        for _ in range(2):
            assert torch.equal(layer(x), expected)
    if "trained" not in change and "backward" not in change:
        assert not torch.equal(before, expected)


def test_no_plan_holds_for_one_factor_of_another_size(layer: LoraLayer) -> None:
    """The result is then a block of another product, or an error, as on the general path."""
    for role in ("down", "up"):
        other = copy.deepcopy(layer)
        x = inputs()
        with torch.no_grad():
            other(x)
        plan = plan_of(other)
        assert holds(plan, other, x)
        cut_rank(other, role)
        assert not holds(plan, other, x)


def test_no_plan_holds_with_a_core(layer: LoraLayer) -> None:
    last(layer).mid = nn.Parameter(torch.rand(2, 2))
    assert not holds(plan_of(layer), layer, inputs())


def test_no_plan_holds_for_another_input(layer: LoraLayer) -> None:
    plan = plan_of(layer)
    for x in (inputs().double(), inputs().bfloat16(), inputs().to("meta")):
        assert plan.output(x, layer._acting, False) is None
    for x in (inputs()[0], inputs()[0, 0], inputs()[:, None], inputs()[:0], inputs().transpose(0, 1)):
        with torch.no_grad():
            y = layer(x)
        assert holds(plan, layer, x) and torch.equal(y, first_output(layer, x)) and y.shape == (*x.shape[:-1], OUT)
    assert plan_of(layer) is plan


def test_no_plan_holds_under_autocast(layer: LoraLayer) -> None:
    x, plan = inputs(), plan_of(layer)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not holds(plan, layer, x)
        assert layer(x).dtype == torch.bfloat16
    assert holds(plan, layer, x)


@pytest.mark.parametrize("name", ["dropout", "hidden_dropout", "rank_dropout", "module_dropout"])
def test_no_plan_holds_where_dropout_acts(layer: LoraLayer, name: str) -> None:
    x, plan = inputs(), plan_of(layer)
    assert holds(plan, layer.train(), x)
    setattr(last(layer), name, 0.5)
    assert not holds(plan, layer, x)
    assert holds(plan, layer.eval(), x)


def test_copies_of_a_training_step_go_before_what_is_kept() -> None:
    layer, x = lora_layer(1, torch.bfloat16), inputs()
    with torch.no_grad():
        before = layer(x)
        plan, branch = plan_of(layer), last(layer)
        branch.rounded = {
            role: Rounded(factor.float() * 2, torch.zeros_like(factor)) for role, factor in branch.roles().items()
        }
        assert not holds(plan, layer, x)
        during = layer(x)
        assert layer.operation.plan is None, "nor is anything kept of them"
        branch.rounded = {}
        assert not torch.equal(before, during) and torch.equal(layer(x), before)


def test_gradients_do_not_use_a_plan(layer: LoraLayer) -> None:
    x = inputs().requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).sum(), x)
    assert bool(grad.any())


def test_only_views_are_kept_of_what_may_be_trained(layer: LoraLayer) -> None:
    x, plan = inputs(), plan_of(layer)
    layer(inputs().requires_grad_())
    with torch.no_grad():
        last(layer).up.data.mul_(2)  # no version tells
        expected = first_output(layer, x)
        for _ in range(2):
            assert torch.equal(layer(x), expected)
    assert layer.operation.plan is (None if plan.are_copies else plan)


@pytest.mark.parametrize("role", ["down", "up"])
def test_one_factor_of_the_dtype_of_the_input_is_no_reason_to_keep_the_other(role: str) -> None:
    layer, x = lora_layer(1), inputs()
    factor = last(layer)._parameters[role]
    factor.data = factor.data.bfloat16()
    with torch.no_grad():
        layer(x)
    assert plan_of(layer).are_copies
    layer(inputs().requires_grad_())
    with torch.no_grad():
        layer(x)
        factor.data.mul_(2)
        assert torch.equal(layer(x), first_output(layer, x))


def test_other_devices_take_the_general_path(layer: LoraLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", frozenset())
    with torch.no_grad():
        assert layer.operation.output(inputs(), layer._acting, False) is None


def test_compiled_programs_read_the_factors(layer: LoraLayer) -> None:
    x, plan = inputs(), plan_of(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
        last(layer).up.data.mul_(2)
        torch.testing.assert_close(compiled(x), first_output(layer, x))
    assert layer.operation.plan is plan


def test_compiled_programs_are_those_of_every_plan(layer: LoraLayer) -> None:
    x, counter = inputs(), CompileCounter()
    compiled = torch.compile(layer, backend=counter)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
            last(layer).up.mul_(2)
            layer(x)  # another plan
        layer.operation.plan = None
        compiled(x)
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("count", [1, 2])
def test_of_inference_tensors_nothing_is_copied(count: int, mode: Callable[[], torch.no_grad]) -> None:
    with torch.inference_mode():
        layer, x = lora_layer(count), inputs()
        with pytest.raises(RuntimeError, match="version"):
            _ = last(layer).up._version
    with mode():
        layer(x)
        assert (layer.operation.plan is None) == (count == 2)
        with torch.inference_mode():
            last(layer).up.mul_(2)
            expected = first_output(layer, x)
        assert torch.equal(layer(x), expected)


def test_plans_are_made_and_used_in_both_modes() -> None:
    for first, second in ((torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)):
        for count in (1, 2):
            layer, x = lora_layer(count), inputs()
            with first():
                layer(x)
            plan = plan_of(layer)
            with second():
                assert torch.equal(layer(x), first_output(layer, x)) and plan_of(layer) is plan
                last(layer).up.mul_(2)
                assert not holds(plan, layer, x)
            assert torch.equal(layer(x), first_output(layer, x)), "with gradients"


def test_nothing_is_kept_of_passes_whose_tensors_do_not_last() -> None:
    for count in (1, 2):
        layer, x = lora_layer(count), inputs()
        with torch.no_grad():
            torch.func.jvp(layer, (x,), (x,))
            assert layer.operation.plan is None
            torch.func.vmap(layer)(x)
            assert layer.operation.plan is None
            with FlopCounterMode(display=False):
                layer(x)
            assert layer.operation.plan is None
            with FakeTensorMode(allow_non_fake_inputs=True) as fake:
                layer(fake.from_tensor(x))
            assert layer.operation.plan is None
            assert torch.equal(layer(x), first_output(layer, x))


@pytest.mark.parametrize("count", [1, 2])
def test_factors_without_memory_are_computed_with(count: int) -> None:
    layer, x = lora_layer(count), inputs()
    factors = {name: factor.detach() for name, factor in layer.named_parameters() if "adapters" in name}
    with torch.no_grad():
        y = torch.func.jvp(lambda each: torch.func.functional_call(layer, each, (x,)), (factors,), (factors,))[0]
        assert torch.equal(y, first_output(layer, x)) and layer.operation.plan is None
        with FakeTensorMode() as fake:
            fakes: dict[str, torch.Tensor] = {
                name: nn.Parameter(fake.from_tensor(value), False) for name, value in layer.named_parameters()
            }
            assert torch.func.functional_call(layer, fakes, (fake.from_tensor(x),)).shape == (2, 3, OUT)
        assert layer.operation.plan is None and torch.equal(layer(x), y)


def test_nothing_is_copied_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for count in (1, 2):
        layer = lora_layer(count)
        with torch.no_grad():
            layer(inputs())
        assert (layer.operation.plan is None) == (count == 2)


def test_nothing_is_kept_of_other_kinds_of_parameters() -> None:
    class Other(nn.Parameter):
        pass

    for role in ("down", "up"):
        layer = lora_layer(1)
        setattr(last(layer), role, Other(last(layer)._parameters[role].detach(), requires_grad=False))
        with torch.no_grad():
            layer(inputs())
        assert layer.operation.plan is None


def test_views_of_a_buffer_are_read_in_every_pass() -> None:
    for count in (1, 2):
        for role in ("down", "up"):
            layer, x = lora_layer(count), inputs()
            factor = last(layer)._parameters[role]
            buffer = torch.zeros(100)
            view = buffer[: factor.numel()].view(factor.shape)
            view.copy_(factor)
            factor.data = view
            with torch.no_grad():
                before = layer(x)
                assert torch.equal(layer(x), before)
                buffer.mul_(2)
                after = layer(x)
            assert torch.equal(after, first_output(layer, x)) and not torch.equal(before, after)
            assert (layer.operation.plan is None) == (count == 2)


def test_memory_of_the_factors_is_held_until_the_next_pass(layer: LoraLayer) -> None:
    """Otherwise another tensor could be allocated at the same address and be mistaken for the factor."""
    for role in ("down", "up"):
        with torch.no_grad():
            layer(inputs())
        factor = last(layer)._parameters[role]
        memory = StorageWeakRef(factor.untyped_storage())
        factor.data = factor.data * 2
        assert not memory.expired()
        with torch.no_grad():
            layer(inputs())
        assert memory.expired()


def test_a_plan_ends_with_a_move_or_another_choice_and_stays_with_its_layer(layer: LoraLayer) -> None:
    x = inputs()
    other = copy.deepcopy(layer)
    assert other.operation.plan is None and layer.operation.plan is not None
    with torch.no_grad():
        other(x)
        last(other).up.mul_(2)
        assert not torch.equal(other(x), layer(x)) and torch.equal(layer(x), first_output(layer, x))
    for change in (lambda: nn.Sequential(layer).to("cpu"), lambda: layer.set_strength("a", 0.5), layer.merge):
        with torch.no_grad():
            layer(x)
            assert layer.operation.plan is not None
            change()
        assert layer.operation.plan is None, "it would hold memory"


def test_nothing_is_kept_on_the_general_path() -> None:
    layer = lora_layer(1)
    layer.base.register_forward_hook(lambda module, x, y: y)
    with torch.no_grad():
        layer(inputs())
    assert layer.operation.plan is None
