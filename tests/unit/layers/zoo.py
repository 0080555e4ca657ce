"""Small layers of every kind with inputs for them, and a second implementation of the adapters on them.

The reference knows nothing of inweave: a float64 copy of the module whose weight is W + the change, by einsum.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from inweave.layers import AdapterSpec, LoraLayer, inject, lora_layers
from inweave.layers.branch import Branch
from inweave.layers.loha import LohaBranch
from inweave.layers.lokr import LokrBranch


class Conv1D(nn.Module):
    """GPT-2's layer as transformers defines it; recognized by its structure only."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], self.nf)


@dataclass(frozen=True)
class Kind:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of an input

    def module(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the layer in a model of its own, with random parameters."""
        generator = torch.Generator().manual_seed(seed)
        layer = self.make()
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
        return nn.ModuleDict({"layer": layer}).to(dtype)

    def input(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + 1)
        layer = self.make()
        if isinstance(layer, nn.Embedding):
            return torch.randint(layer.num_embeddings, self.shape, generator=generator)
        return torch.randn(self.shape, generator=generator).to(dtype)


KINDS: dict[str, Kind] = {
    "linear": Kind(lambda: nn.Linear(7, 5), (3, 4, 7)),
    "linear-no-bias": Kind(lambda: nn.Linear(5, 9, bias=False), (6, 5)),
    "conv1D": Kind(lambda: Conv1D(6, 5), (2, 3, 5)),
    "conv1D-square": Kind(lambda: Conv1D(5, 5), (2, 3, 5)),
    "embedding": Kind(lambda: nn.Embedding(11, 5), (2, 7)),
    "embedding-padding": Kind(lambda: nn.Embedding(9, 3, padding_idx=2), (2, 7)),
    "conv1d": Kind(lambda: nn.Conv1d(3, 4, 3, padding=1), (2, 3, 8)),
    "conv1d-groups": Kind(lambda: nn.Conv1d(6, 4, 3, stride=2, dilation=2, groups=2, bias=False), (2, 6, 11)),
    "conv2d": Kind(lambda: nn.Conv2d(3, 5, 3, padding=1), (2, 3, 6, 5)),
    "conv2d-1x1": Kind(lambda: nn.Conv2d(4, 3, 1), (2, 4, 3, 3)),
    "conv2d-odd": Kind(lambda: nn.Conv2d(3, 4, (1, 5), stride=(2, 3), padding=(1, 4), dilation=(1, 2)), (2, 3, 5, 9)),
    "conv2d-groups": Kind(lambda: nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=3), (2, 6, 7, 7)),
    "conv2d-depthwise": Kind(lambda: nn.Conv2d(5, 5, 3, padding=1, groups=5), (2, 5, 5, 5)),
    "conv2d-reflect": Kind(lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect"), (2, 3, 5, 5)),
    "conv2d-circular": Kind(lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2, padding_mode="circular"), (2, 4, 5, 5)),
    "conv2d-same": Kind(lambda: nn.Conv2d(3, 4, (2, 4), padding="same", dilation=2), (2, 3, 6, 6)),
    "conv3d": Kind(lambda: nn.Conv3d(2, 3, (3, 1, 2), padding=(1, 0, 1)), (2, 2, 4, 3, 3)),
}
#: what may be trained, with sizes so small that every form of a factor comes up
NETWORKS: dict[str, dict[str, object]] = {
    "loha": {"network": "loha"},
    "loha-dora": {"network": "loha", "dora": True},
    "loha-rslora": {"network": "loha", "rslora": True},
    "lokr": {"network": "lokr", "rank": 1},
    "lokr-full": {"network": "lokr", "rank": 9},
    "lokr-both": {"network": "lokr", "rank": 1, "factor": 3, "decompose_both": True},
    "lokr-dora": {"network": "lokr", "rank": 1, "factor": 2, "dora": True},
}
#: the kinds that take them: all but embeddings
OPERATORS = tuple(kind for kind in KINDS if not kind.startswith("embedding"))
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


_SPEC = {field.name for field in fields(AdapterSpec)}


def injected(model: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Call `inject`, with the fields of its `AdapterSpec` passed by name."""
    spec = AdapterSpec(**{name: options.pop(name) for name in list(options) if name in _SPEC})
    return inject(model, *arguments, **options, spec=spec)


def layer_of(model: nn.Module) -> LoraLayer:
    return next(iter(lora_layers(model).values()))


def fill(model: nn.Module, seed: int = 3, std: float = 0.5, name: str = "default") -> None:
    """Give every number of an adapter a value, so that nothing is proved on zeros."""
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(model).values():
        for role, parameter in layer.branch(name).named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            with torch.no_grad():
                parameter.copy_(parameter.float().abs() + noise.abs() if role == "magnitude" else noise)


def adapted(kind: str, rank: int = 3, alpha: float | None = 5.0, **options: object) -> nn.Module:
    """Return a model of one layer with one filled adapter."""
    model = KINDS[kind].module()
    injected(model, rank, alpha, ["layer"], **options)  # type: ignore[arg-type]
    fill(model)
    return model


def networked(kind: str, network: str, dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
    """Return the same model with one of `NETWORKS`."""
    model = KINDS[kind].module(dtype=dtype)
    injected(model, **{"rank": 3, "alpha": 5.0, "targets": ["layer"]} | NETWORKS[network] | options)  # type: ignore[arg-type]
    fill(model)
    return model


def product_of(branch: Branch, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """(out, all inputs), every step in ``dtype``."""
    of = {role: value.detach().to(dtype) for role, value in branch.roles().items()}

    def half(a: str, b: str, core: str) -> torch.Tensor:
        if core in of:
            return torch.einsum("pq...,po,qi->oi...", of[core], of[a], of[b]).flatten(1)
        return of[a].flatten(1) @ of[b].flatten(1)

    if isinstance(branch, LohaBranch):
        return half("w1_a", "w1_b", "t1") * half("w2_a", "w2_b", "t2")
    if isinstance(branch, LokrBranch):
        left = of["w1"].flatten(1) if "w1" in of else half("w1_a", "w1_b", "")
        right = of["w2"].flatten(1) if "w2" in of else half("w2_a", "w2_b", "t2")
        return torch.cat([torch.cat([number * right for number in row], dim=1) for row in left])
    up, down = of["up"].flatten(1), of["down"]
    if "mid" in of:
        down = torch.einsum("ab...,bi->ai...", of["mid"], down.flatten(1))
    count = down.shape[0] // up.shape[1]
    blocks = zip(up.chunk(count), down.flatten(1).chunk(count), strict=True)
    return torch.cat([rows @ columns for rows, columns in blocks])


def changed_weight(layer: LoraLayer, branch: Branch, weight: torch.Tensor, strength: float) -> torch.Tensor:
    """W + strength * change, all in float64; W as (out, in, ...)."""
    change = branch.scale * product_of(branch).reshape(weight.shape)
    if branch.magnitude is None:
        return weight + strength * change
    turned = weight + change
    norm = turned.flatten(1).norm(dim=1)
    turned = turned * (branch.magnitude.detach().double() / norm).reshape(-1, *[1] * (weight.dim() - 1))
    return weight + strength * (turned - weight)


def reference(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the expected output of the one-layer ``model``, in float64."""
    layer = layer_of(model)
    base = copy.deepcopy(layer.base).double()
    stored = base.weight.detach()
    weight = stored.T if layer.transposed else stored
    total = weight.clone()
    for name in layer.active:
        total += changed_weight(layer, layer.branch(name), weight, layer.strengths[name]) - weight
    base.weight = nn.Parameter(total.T.contiguous() if layer.transposed else total)
    with torch.no_grad():
        return base(x.double() if x.is_floating_point() else x)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def base_bits(model: nn.Module) -> dict[str, bytes]:
    return {name: bits(value) for name, value in model.state_dict().items() if ".adapters." not in name}
