"""What the tensors of a live model imply: the index that adapters are placed on, its blocks, and where tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from inweave.adapter import Adapter
from inweave.errors import TargetError
from inweave.ops.common.select import has_kernels
from inweave.ops.kinds.wrappers import peft_problem
from inweave.targets.index import ModelIndex, component_from_names
from inweave.targets.plan import Plan
from inweave.weights.blocks import block_names
from inweave.weights.live import LiveModel
from inweave.weights.orientation import Orientation, known_layouts


class LiveIndex:
    """The index of a live model for the present shapes of its tensors; replaced when they change."""

    def __init__(self, modules: Mapping[str, nn.Module], live: LiveModel) -> None:
        self._live = live
        self.layout = live.layout()
        shapes: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in modules}
        for (component, tensor), shape in self.layout.items():
            shapes[component][tensor] = shape
        components = {
            name: replace(component_from_names(name, each), layouts=known_layouts(modules[name]))
            for name, each in shapes.items()
        }
        self.index = ModelIndex(components, in_order=True)
        self.blocks = block_names(self.index)
        self._orientation = Orientation(modules, self.index)

    def resolve(self, adapter: Adapter, *, strict: bool) -> Plan:
        """Place an adapter; errors also say which weights take none, and the report which ones are tied."""
        try:
            plan = self._orientation.resolve(adapter, strict=strict)
        except TargetError as error:
            peft = [problem for each in self._live.networks.values() if (problem := peft_problem(each))]
            raise TargetError("\n".join([*peft, str(error), *self._live.unwritable()])) from None
        for key in dict.fromkeys((p.component, p.tensor) for p in plan.placements):
            if others := self._live.shared(key):
                plan.report.warnings.append(f"{key[1]}: tied, it shares its memory with {', '.join(others)}")
        return plan


def tensors_by_component(live: LiveModel) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of every network."""
    tensors: dict[str, list[torch.Tensor]] = {}
    for (component, _), slot in live.slots.items():
        tensors.setdefault(component, []).append(slot.tensor)
    return tensors


def cuda_device(tensors: Mapping[str, list[torch.Tensor]]) -> torch.device | None:
    """Return the only device of all tensors, if kernels run on it."""
    devices = {tensor.device for every in tensors.values() for tensor in every}
    return devices.pop() if len(devices) == 1 and has_kernels(next(iter(devices))) else None
