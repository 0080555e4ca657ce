"""Every kind of layer: the forward formula, merged and unmerged, against a second writing of it in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from inweave.adapter import Lora
from inweave.errors import TargetError
from inweave.layers import LoraLayer, eject, inject, lora_layers, merge, unmerge
from inweave.layers.algorithms import obstacle, to_branch
from inweave.ops.tensors.decode import encode
from tests.unit.layers.zoo import DTYPES, KINDS, adapted, base_bits, bits, fill, injected, layer_of, reference

OPTIONS = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "no-alpha": {"alpha": None},
    "wide": {"rank": 12, "alpha": 3.0},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_the_formula_merged_or_not(kind: str, options: str) -> None:
    model, x = adapted(kind, **OPTIONS[options]), KINDS[kind].input()  # type: ignore[arg-type]
    expected, layer = reference(model, x), layer_of(model)
    assert (expected - layer.base(x).double()).abs().max() > 0.1  # the adapter does something
    torch.testing.assert_close(model["layer"](x).double(), expected, rtol=1e-5, atol=1e-5)
    merge(model)
    torch.testing.assert_close(model["layer"](x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_adapter_changes_nothing(kind: str) -> None:
    x = KINDS[kind].input()
    plain = KINDS[kind].module()
    before = plain["layer"](x)
    model = inject(copy.deepcopy(plain), 3, 5.0, ["layer"])
    assert torch.equal(model["layer"](x), before)
    decomposed = injected(plain, 3, 5.0, ["layer"], dora=True)
    torch.testing.assert_close(decomposed["layer"](x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_copied_and_eject_gives_back_the_same_objects(kind: str) -> None:
    model = KINDS[kind].module()
    layer, parameters = model["layer"], list(model.parameters())
    names, before = list(model.state_dict()), base_bits(model)
    inject(model, 3, 5.0, ["layer"])
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert all(a is b for a, b in zip(frozen, parameters, strict=True))
    assert [name for name in model.state_dict() if ".adapters." not in name] == names
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["layer.adapters.default.down", "layer.adapters.default.up"]
    fill(model)
    merge(model)
    unmerge(model)
    eject(model)
    assert model["layer"] is layer
    assert all(a is b and a.requires_grad for a, b in zip(model.parameters(), parameters, strict=True))
    assert base_bits(model) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_merging_is_in_place_and_unmerging_restores_the_bits(kind: str, dtype: str) -> None:
    model = KINDS[kind].module(dtype=DTYPES[dtype])
    inject(model, 3, 5.0, ["layer"])
    fill(model)
    layer = layer_of(model)
    before, where = base_bits(model), layer.weight.data_ptr()
    merge(model)
    assert layer.weight.data_ptr() == where
    assert base_bits(model) != before
    expected = layer._pristine.float() + change_of(layer)
    assert torch.equal(layer.weight, expected.to(DTYPES[dtype]))  # one rounding of a float32 sum
    unmerge(model)
    assert layer.weight.data_ptr() == where
    assert base_bits(model) == before


def change_of(layer: LoraLayer) -> torch.Tensor:
    from inweave.ops.delta import change

    return change(layer.factors("default"), layer._pristine)


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_layer_does_the_base_layers_work_and_no_more(kind: str) -> None:
    x = KINDS[kind].input()
    model = adapted(kind, dora=True)

    def operations() -> list[str]:
        with torch.no_grad(), Counted() as counted:
            model["layer"](x)
        return counted.operations

    unmerged = operations()
    merge(model)
    merged = operations()
    model["layer"] = layer_of(model).base
    assert merged == operations()
    assert len(unmerged) > len(merged)


@pytest.mark.parametrize("kind", KINDS)
def test_a_grouped_pair_from_a_file_keeps_its_blocks(kind: str) -> None:
    """up with rank / groups columns: each group has rows of `down` of its own."""
    model = KINDS[kind].module()
    inject(model, 1, targets=["layer"])
    layer, x = layer_of(model), KINDS[kind].input()
    groups = layer.geometry.groups if layer.geometry.groups > 1 else layer.out
    if layer.kind.embedding:
        groups = 1
    generator = torch.Generator().manual_seed(0)
    tail = [1] * (len(layer.into) - 1)
    factors = Lora(
        down=encode(torch.randn(2 * groups, *layer.into, generator=generator)),
        up=encode(torch.randn(layer.out, 2, *tail, generator=generator)),
        alpha=1.5,
    )
    assert obstacle(factors, layer.geometry) is None
    layer.add("grouped", to_branch(factors, layer.geometry, dtype=None, device=torch.device("cpu")))
    layer.activate(["grouped"])
    assert layer.branch("grouped").blocks == groups
    expected = reference(model, x)
    torch.testing.assert_close(model["layer"](x).double(), expected, rtol=1e-5, atol=1e-5)
    layer.merge()
    torch.testing.assert_close(model["layer"](x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["conv1d", "conv2d-odd", "conv2d-groups", "conv2d-reflect", "conv3d"])
def test_a_tucker_core(kind: str) -> None:
    model = KINDS[kind].module()
    inject(model, 1, targets=["layer"])
    layer, x = layer_of(model), KINDS[kind].input()
    generator = torch.Generator().manual_seed(0)
    tail = [1] * (len(layer.into) - 1)
    factors = Lora(
        down=encode(torch.randn(4, layer.into[0], *tail, generator=generator)),
        mid=encode(torch.randn(3, 4, *layer.into[1:], generator=generator)),
        up=encode(torch.randn(layer.out, 3, *tail, generator=generator)),
        alpha=2.0,
    )
    assert obstacle(factors, layer.geometry) is None
    layer.add("tucker", to_branch(factors, layer.geometry, dtype=None, device=torch.device("cpu")))
    layer.activate(["tucker"])
    expected = reference(model, x)
    torch.testing.assert_close(model["layer"](x).double(), expected, rtol=1e-4, atol=1e-4)
    layer.merge()
    torch.testing.assert_close(model["layer"](x).double(), expected, rtol=1e-4, atol=1e-4)
    back = layer.factors("tucker")
    assert isinstance(back, Lora) and back.mid is not None and factors.mid is not None and back.mid.same(factors.mid)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_stands_for_its_module(kind: str) -> None:
    """Attributes, train/eval, moving, copying and saving behave as those of the module it replaced."""
    model, x = adapted(kind, dora=True), KINDS[kind].input()
    layer = layer_of(model)
    for name in ("in_features", "out_features", "kernel_size", "embedding_dim", "nf"):
        assert hasattr(layer, name) == hasattr(layer.base, name)
    assert layer.weight is layer.base.weight
    with pytest.raises(AttributeError):
        layer.no_such_thing  # noqa: B018
    model.eval()
    assert not layer.base.training
    before = model["layer"](x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin["layer"](x), before)
    inner = layer_of(twin)
    assert inner.weight is inner.base.weight and inner.weight is not layer.weight
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other = injected(KINDS[kind].module(seed=9), 3, 5.0, ["layer"], dora=True)
    other.load_state_dict(state, assign=True)
    assert torch.equal(other["layer"](x), before)
    model.double()
    assert layer.base.weight.dtype == torch.float64
    assert model["layer"](x.double() if x.is_floating_point() else x).dtype == torch.float64


@pytest.mark.parametrize("kind", ["linear", "conv1D", "conv2d-groups", "embedding"])
def test_torch_compile_sees_one_graph(kind: str) -> None:
    model, x = adapted(kind, dora=True), KINDS[kind].input()
    compiled = torch.compile(model["layer"], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model["layer"](x))


def test_autocast_computes_in_its_dtype() -> None:
    model, x = adapted("linear"), KINDS["linear"].input()
    with torch.autocast("cpu", torch.bfloat16):
        low = model["layer"](x)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), model["layer"](x), rtol=0.05, atol=0.05)


class ScaledEmbedding(nn.Embedding):
    """As Bart and Gemma have it."""

    def __init__(self) -> None:
        super().__init__(9, 4)
        self.embed_scale = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.embed_scale


class OtherLinear(nn.Linear):
    """As Falcon has it: the same function, written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


class Squared(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) ** 2


class Positions(nn.Embedding):
    """As OPT has it: another signature."""

    def forward(self, x: torch.Tensor, past: int) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + past)


@pytest.mark.parametrize(
    ("layer", "x"), [(ScaledEmbedding(), torch.tensor([1, 5])), (OtherLinear(3, 4), torch.ones(2, 3))]
)
def test_overridden_forwards_that_compute_the_same_are_taken(layer: nn.Module, x: torch.Tensor) -> None:
    model = inject(nn.ModuleDict({"layer": layer}), 2, 3.0, ["layer"])
    fill(model)
    before = model["layer"](x)
    torch.testing.assert_close(before.double(), reference(model, x), rtol=1e-5, atol=1e-5)
    merge(model)
    torch.testing.assert_close(model["layer"](x), before)


@pytest.mark.parametrize("layer", [Squared(3, 4), Positions(5, 3)])
def test_overridden_forwards_that_compute_something_else_are_refused(layer: nn.Module) -> None:
    model = nn.ModuleDict({"layer": layer})
    with pytest.raises(TargetError, match="overrides forward"):
        inject(model, 2, targets=["layer"])
    assert model["layer"] is layer
    assert all(parameter.requires_grad for parameter in model.parameters())


def unfit_layers() -> dict[str, tuple[nn.Module, str]]:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    whole = nn.Linear(3, 3)
    whole.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False)
    return {
        "norm": (nn.LayerNorm(3), "not a layer that takes LoRA"),
        "transposed": (nn.ConvTranspose2d(3, 3, 3), "not a layer that takes LoRA"),
        "weight norm": (normed, "computed from other tensors"),
        "lazy": (nn.LazyLinear(3), "no shape yet"),
        "int8": (whole, "int8"),
        "max_norm": (nn.Embedding(5, 3, max_norm=1.0), "max_norm"),
    }


@pytest.mark.parametrize("case", unfit_layers())
def test_layers_that_cannot_take_lora_say_why(case: str) -> None:
    layer, reason = unfit_layers()[case]
    with pytest.raises(TargetError, match=f"layer: .*{reason}"):
        inject(nn.ModuleDict({"layer": layer}), 2, targets=["layer"])


def test_multihead_attention_never_calls_its_projection() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    with pytest.raises(TargetError, match="never calls"):
        inject(model, 2, targets=["out_proj"])


def test_the_fast_path_of_torchs_encoder_layer_does_not_lose_the_adapter() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        before = model(x)
    inject(model, 2, targets=["linear1", "linear2"])
    fill(model)
    slow = model(x)
    with torch.no_grad():
        fast = model(x)
    torch.testing.assert_close(slow, fast)
    assert (fast - before).abs().max() > 0.1
    assert set(lora_layers(model)) == {"linear1", "linear2"}


def test_values_that_overflow_are_refused_and_nothing_changes() -> None:
    model = KINDS["linear"].module(dtype=torch.float16)
    inject(model, 2, targets=["layer"])
    fill(model, std=400.0)
    before = bits(layer_of(model).weight)
    with pytest.raises(TargetError, match="float16 cannot hold"):
        merge(model)
    assert bits(layer_of(model).weight) == before
    assert not layer_of(model).merged
