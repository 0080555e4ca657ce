"""Training trains the adapters and nothing else; chosen base weights along with them, on request."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from inweave.errors import ConfigError, MergeStateError, TargetError
from inweave.layers import eject, freeze, inject, lora_layers, merge, trainable, unmerge
from tests.unit.layers.zoo import KINDS, adapted, base_bits, bits, injected, layer_of


class Net(nn.Module):
    """Every kind of layer in one network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.time = nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.image = nn.Conv2d(1, 4, 3, padding=1, stride=2)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.time(self.embed(x).transpose(1, 2)).transpose(1, 2)
        features = self.image(hidden[:, None]).mean((1, 2))
        output: torch.Tensor = self.head(self.norm(hidden.mean(1) + torch.cat([features, features], 1)))
        return output


TARGETS = ["embed", "time", "image", "head"]


def train(model: nn.Module, steps: int = 60) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(16, (24, 6), generator=generator)
    labels = torch.randint(5, (24,), generator=generator)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


OPTIONS = [
    {}, {"dora": True}, {"rslora": True}, {"dropout": 0.2}, {"network": "loha"}, {"network": "loha", "dora": True},
    {"network": "lokr"}, {"network": "lokr", "dropout": 0.2},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_loss_falls_and_only_adapters_change(options: dict[str, object]) -> None:
    targets = TARGETS[1:] if "network" in options else TARGETS  # an embedding takes LoRA only
    model = injected(Net(), 4, 8.0, targets, **options)  # type: ignore[arg-type]
    before, start = base_bits(model), {name: bits(p) for name, p in model.named_parameters() if p.requires_grad}
    losses = train(model)
    assert losses[-1] < 0.7 * losses[0]
    assert base_bits(model) == before
    assert all(bits(dict(model.named_parameters())[name]) != old for name, old in start.items())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    model.eval()
    x = torch.arange(12).reshape(2, 6)
    unmerged = model(x)
    merge(model)
    torch.testing.assert_close(model(x), unmerged, rtol=1e-4, atol=1e-4)


def test_training_is_repeatable() -> None:
    assert train(inject(Net(), 4, 8.0, TARGETS), 5) == train(inject(Net(), 4, 8.0, TARGETS), 5)


@pytest.mark.parametrize("network", ["lora", "loha", "lokr"])
def test_bf16_base_trains_float32_adapters(network: str) -> None:
    model = injected(Net().bfloat16(), 4, 8.0, TARGETS if network == "lora" else TARGETS[1:], network=network)  # type: ignore[arg-type]
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    before = base_bits(model)
    losses = train(model)
    assert losses[-1] < 0.7 * losses[0]
    assert base_bits(model) == before


@pytest.mark.parametrize("kind", ["linear", "conv1D", "conv2d-groups", "conv1d"])
def test_dropout_acts_in_training_only(kind: str) -> None:
    model, x = adapted(kind, dropout=0.5), KINDS[kind].input()
    without = adapted(kind)
    model.eval(), without.eval()
    assert torch.equal(model["layer"](x), without["layer"](x))
    model.train()
    torch.manual_seed(0)
    first, second = model["layer"](x), model["layer"](x)
    assert not torch.equal(first, second)
    base, layer = layer_of(model).base, layer_of(model)
    torch.manual_seed(0)
    pair = layer.branch("default")
    dropped = pair.output(layer.kind, base, nn.functional.dropout(x, 0.5), x.dtype)
    torch.testing.assert_close(first, base(x) + pair.scale * dropped)  # the base sees the whole input
    layer.merge()
    assert torch.equal(model["layer"](x), base(x))


def test_an_embedding_has_nothing_to_drop() -> None:
    model, x = adapted("embedding", dropout=0.9), KINDS["embedding"].input()
    assert torch.equal(model.train()["layer"](x), adapted("embedding")["layer"](x))


def test_the_padding_row_of_an_embedding_is_not_trained() -> None:
    model = adapted("embedding-padding")
    model["layer"](torch.arange(9)).sum().backward()
    grad = layer_of(model).branch("default").down.grad
    assert not grad[:, 2].any() and grad[:, 1].any()


def test_chosen_weights_are_trained_as_owned_copies(tmp_path: Path) -> None:
    model = Net()
    path = tmp_path / "head.bin"
    path.write_bytes(model.head.weight.detach().numpy().tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    view = torch.frombuffer(mapped, dtype=torch.float32).reshape(5, 8)
    model.head.weight = nn.Parameter(view, requires_grad=False)
    inject(model, 4, 8.0, ["time", "head"])
    before = base_bits(model)
    assert trainable(model, ["head.weight", "norm"]) == ["norm.weight", "norm.bias", "head.weight"]
    assert model.head.weight.data_ptr() != view.data_ptr()
    assert model.head.base.weight is model.head.weight
    train(model, 3)
    after = base_bits(model)
    assert {name for name in after if after[name] != before[name]} == {"norm.weight", "norm.bias", "head.weight"}
    assert path.read_bytes() == before["head.weight"]
    merge(model)
    unmerge(model)
    assert base_bits(model) == after
    assert freeze(model, ["head.weight"]) == ["head.weight"]
    train(model, 1)
    assert base_bits(model)["head.weight"] == after["head.weight"]
    assert set(freeze(model)) == set(base_bits(model))
    assert all(".adapters." in name for name, p in model.named_parameters() if p.requires_grad)
    freeze(model, r".*\.adapters\..*")
    assert not any(p.requires_grad for p in model.parameters())
    eject(model)
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"head.weight"}  # as before inject


def test_tied_weights_stay_tied_when_trained() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(9, 6), "out": nn.Linear(6, 9), "proj": nn.Linear(6, 6)})
    model["out"].weight = model["embed"].weight
    inject(model, 2, targets=["proj"])
    trainable(model, ["embed"], dtype=torch.float64)
    assert model["embed"].weight is model["out"].weight
    assert model["embed"].weight.requires_grad and model["embed"].weight.dtype == torch.float64
    assert not model["out"].bias.requires_grad


def test_what_cannot_be_trained_is_refused() -> None:
    model = inject(Net(), 2, targets=["head"])
    with pytest.raises(ConfigError, match="matches no module; the nearest are norm"):
        trainable(model, ["norm1"])
    merge(model)
    with pytest.raises(MergeStateError, match="unmerge first"):
        trainable(model, ["head.weight"])
    unmerge(model)
    model.register_parameter("steps", nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False))
    with pytest.raises(TargetError, match="cannot be trained"):
        trainable(model, ["steps"])


def test_gradients_pass_through_a_frozen_base() -> None:
    """x needs gradients too: a layer below must be trained through this one."""
    model, x = adapted("linear", dora=True), KINDS["linear"].input().requires_grad_()
    model["layer"](x).sum().backward()
    unmerged = x.grad.clone()
    x.grad = None
    merge(model)
    model["layer"](x).sum().backward()
    torch.testing.assert_close(unmerged, x.grad, rtol=1e-5, atol=1e-5)
    assert all(layer.weight.grad is None for layer in lora_layers(model).values())
