"""A source under the names a live module has.

Files and modules disagree in five small ways, all of them older than the code that reads them:

    text_model.encoder...                 transformers dropped the level in memory, files keep it (and the reverse)
    model.layers...                       the same of a language model built without its head, or out of a larger one
    mid_block.attentions.0.query          the attention of old VAE files, today `to_q` (key, value, proj_attn likewise)
    [c, c, 1, 1] for [c, c]               the same attention stored as a 1x1 convolution
    language_model.model...               such levels in another order, where only one tensor has the rest of a name

Tensors of a file that the module lacks are allowed only if they are known to be unused (`IDLE`).

`Cast` is a source in the model's precision: an adapter is added to the weight as the model has it, so that merging
while loading and swapping afterwards give the same bits for every precision of the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from inweave.ops.quantized import QuantizedWeight
from inweave.targets.plan import Rows
from inweave.weights.held import quantized_weight
from inweave.weights.source import TensorSpec, WeightSource, stamps_of

#: tensors of files that no module has, and that change nothing
IDLE = re.compile(
    r"(.*\.)?(position_ids|logit_scale)$"
    r"|(.*\.)?encoder\.layers\.23\..*"  # the last layer of OpenCLIP ViT-H, which SD 2 leaves out
    r"|text_projection(\.weight)?$|transformer\.text_projection$"  # where the module has no projection
    r"|encoder\.embed_tokens\.weight$|decoder\..*|lm_head\.weight$"  # T5: tied to `shared`, or not the encoder's
    r"|((model\.)?visual|(model\.)?vision_tower|(model\.)?multi_modal_projector)\..*"  # of a language model that sees
    r"|language_model\.lm_head\.weight$|tekken_model$|.*\.num_batches_tracked$"
    r"|__index_timestep_zero__$"  # an empty mark
)
_LEVELS = ("text_model", "model", "model.language_model", "language_model.model")
_WRAPPERS = frozenset({"text_model", "model", "language_model"})
_OLD_ATTENTION = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
_ATTENTION = re.compile(r"(.*\.attentions\.\d+)\.(to_q|to_k|to_v|to_out\.0)\.(weight|bias)")


class Mapped:
    """A source under other names, each with the shape the module expects; ``ours`` maps its names to the source's."""

    def __init__(self, source: WeightSource, ours: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._source = source
        self.stamps = stamps_of(source)
        self._ours = ours
        self._shapes = shapes

    def names(self) -> Collection[str]:
        return self._ours.keys()

    def spec(self, name: str) -> TensorSpec:
        spec = self._source.spec(self._ours[name])
        return TensorSpec(self._shapes.get(name, spec.shape), spec.dtype)

    def get(self, name: str, **options: Any) -> Tensor:
        tensor = self._source.get(self._ours[name], **options)
        shape = self._shapes.get(name)
        return tensor if shape is None else tensor.reshape(tensor.shape[0], *shape[1:])

    def quantized(self, name: str, device: torch.device | str, rows: Rows | None = None) -> QuantizedWeight | None:
        return quantized_weight(self._source, self._ours[name], device, rows)


class Cast:
    """A source whose numbers are rounded to ``dtype`` as they are read."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self._source = source
        self._dtype = dtype

    def names(self) -> Collection[str]:
        return self._source.names()

    def spec(self, name: str) -> TensorSpec:
        spec = self._source.spec(name)
        return TensorSpec(spec.shape, self._dtype) if spec.dtype.is_floating_point else spec

    def get(self, name: str, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        stored = self.spec(name).dtype
        return self._source.get(name, dtype=stored, **options).to(dtype or stored)

    def quantized(self, name: str, device: torch.device | str, rows: Rows | None = None) -> QuantizedWeight | None:
        return quantized_weight(self._source, name, device, rows)


def under_names_of(module: nn.Module, source: WeightSource) -> WeightSource:
    """Return ``source`` under the tensor names of ``module``; `build` reports tensors that do not fit."""
    names = set(source.names())
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()}
    ours: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    cores, own_cores = _by_core(names), _by_core(expected)
    for name, shape in expected.items():
        stored = next((other for other in _spellings(name) if other in names), None)
        if stored is None and len(own_cores[_core(name)]) == len(cores.get(_core(name), ())) == 1:
            (stored,) = cores[_core(name)]
        if stored is None:
            continue
        ours[name] = stored
        have = source.spec(stored).shape
        if have != shape and _squeezed(have) == _squeezed(shape):
            shapes[name] = shape
    used = set(ours.values())
    ours |= {name: name for name in names if name not in used and name not in ours and not IDLE.fullmatch(name)}
    unchanged = not shapes and all(a == b for a, b in ours.items()) and len(ours) == len(names)
    return source if unchanged else Mapped(source, ours, shapes)


def _spellings(name: str) -> list[str]:
    spellings = [name, *(f"{level}.{name}" for level in _LEVELS), name.removeprefix("text_model.")]
    if match := _ATTENTION.fullmatch(name):
        spellings.append(f"{match[1]}.{_OLD_ATTENTION[match[2]]}.{match[3]}")
    if name == "shared.weight":
        spellings.append("encoder.embed_tokens.weight")
    return spellings


def _core(name: str) -> str:
    """Return a name without the levels that language models are wrapped in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _by_core(names: Collection[str]) -> dict[str, list[str]]:
    cores: dict[str, list[str]] = {}
    for name in names:
        cores.setdefault(_core(name), []).append(name)
    return cores


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
