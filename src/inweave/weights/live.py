"""The weights of a live model, where they are now: looked up for every stack, since a model may change in between.

    place     (module, attribute) -> the tensor there; a module under two names is one place
    home      where its numbers are stored: the tensor itself, or the one that the hook of accelerate's offloading keeps
    copies    rows of a fused projection: after diffusers' `fuse_qkv_projections`, `to_q` is also rows of `to_qkv`
    shared    places of other modules whose memory overlaps: tied weights
    quantized a layer of `inweave.ops.quantized`: the bytes of its tensors, under the name of its weight
    mark      ((identity, address, dtype, device), version) of a home: any difference is a write or move from outside

What cannot be written is refused by name: tensors on the meta device, offloaded to disk, quantized by other libraries,
or expanded.
Writes through `.data` or a raw pointer leave no mark and go unnoticed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from inweave.errors import MergeStateError, TargetError
from inweave.ops.kinds.offloaded import ON_DISK, elsewhere, in_memory, offload_groups, weight_maps
from inweave.ops.kinds.wrappers import named_modules, unwrapped
from inweave.ops.quantized import QuantizedLayer
from inweave.ops.tensors.overlaps import address, overlaps
from inweave.ops.tensors.subclasses import class_of, holds_others, sharding_modules
from inweave.targets.spellings import FUSED
from inweave.weights.networks import Slot, quantized_layers, slots
from inweave.weights.quantized import packed_memory, quantized_layer
from inweave.weights.snapshot import Entry, Snapshot
from inweave.weights.stack import TensorKey

Home = tuple[int, str]  #: id of a module, attribute
Place = tuple[int, int, torch.dtype, torch.device]
Mark = tuple[Place, int]


@dataclass(frozen=True, slots=True)
class LiveHome:
    """``tensor``: detached, to be written; ``owner``: the tensor whose version counts; ``copies``: written after it."""

    tensor: torch.Tensor
    owner: torch.Tensor
    copies: tuple[torch.Tensor, ...]
    place: Place
    counts: bool = True  # tensors made in inference mode have no version

    def mark(self) -> Mark:
        return self.place, self.owner._version if self.counts else -1


class LiveModel:
    """The floating-point tensors of some networks. Call `look` before anything else of a new stack."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self.networks = networks
        self.slots: dict[TensorKey, Slot] = {}
        self._rows: dict[
            TensorKey, list[tuple[str, torch.Tensor, int]]
        ] = {}  # part -> the fused projections that contain it
        self._groups: dict[int, object] = {}  # id of a tensor -> diffusers' offload group
        self._sharded: set[str] = set()  # components, of which parts may be gathered at present
        self._quantized: dict[TensorKey, torch.Tensor] = {}
        self.layers: dict[TensorKey, QuantizedLayer] = {}
        self._homes: dict[TensorKey, LiveHome] = {}
        self.first: dict[Home, TensorKey] = {}  # the first name of every place
        self._shared: dict[TensorKey, list[TensorKey]] = {}
        self._whole: Snapshot | None = None
        self._watched: tuple[int, int, Snapshot] | None = None
        self._above: dict[int, tuple[Entry, nn.Module]] = {}  # id of a module -> where it is held, and by whom
        self.looks = 0  # how many times all tensors were looked up
        self.look()

    def look(self) -> int:
        """Find everything again where anything was replaced or moved; returns how often it was, so far."""
        if self._whole is not None and self._whole.holds():
            return self.looks
        self.looks += 1
        self._whole = None  # until all of it is known
        self.slots, self._rows, self._groups, self._quantized, self.layers = {}, {}, {}, {}, {}
        for component, network in self.networks.items():
            self._add(component, network)
        self.first = {}
        for key, slot in self.slots.items():
            self.first.setdefault((id(slot.module), slot.leaf), key)
        self._homes = {}
        self._shared = self._overlaps()
        stored = [slot.tensor for slot in self.slots.values() if address(slot.tensor)]
        entries, self._above = list[Entry](), {}
        for network in self.networks.values():
            entries += _entries_of(network, self._above)
        self._whole = Snapshot(entries, stored)
        return self.looks

    def are_unchanged(self, keys: Collection[TensorKey]) -> bool:
        """Return whether these tensors and the modules above them are where the last look saw them; faster than
        a look.
        """
        if self._whole is None:
            return False
        if self._watched is None or self._watched[:2] != (self.looks, len(keys)):
            rows: dict[tuple[int, str], Entry] = {}
            for key in keys:
                slot = self.slots.get(key)
                if slot is None or not address(slot.tensor):
                    return False
                members = slot.module._parameters if slot.leaf in slot.module._parameters else slot.module._buffers
                rows[id(members), slot.leaf] = (members, slot.leaf, slot.tensor)
                module: nn.Module | None = slot.module
                while module is not None and id(module) in self._above:
                    entry, module = self._above[id(module)]
                    rows[id(entry[0]), entry[1]] = entry
            tensors = [self.slots[key].tensor for key in keys]
            self._watched = self.looks, len(keys), self._whole.part(rows.values(), tensors)
        return self._watched[2].holds()

    def _add(self, component: str, network: nn.Module) -> None:
        layers = quantized_layers(network)
        for layer in layers.values():
            packed_memory(layer)
        every = slots(network)
        for path, layer in layers.items():
            dot = f"{path}." if path else ""
            for leaf in layer.weights._fields[1:]:
                del every[dot + leaf]
            self.slots[component, f"{dot}weight"] = every.pop(dot + layer.weights._fields[0])
            self.layers[component, f"{dot}weight"] = layer
        fixed = {name: slot.tensor for name, slot in every.items() if not slot.tensor.is_floating_point()}
        every = {name: slot for name, slot in every.items() if name not in fixed}
        self._quantized |= {(component, name): tensor for name, tensor in fixed.items() if name.endswith("weight")}
        for whole, parts in list(_fused(network, every)):
            tensor, start = every[whole].tensor, 0
            for part in parts:
                self._rows.setdefault((component, part), []).append((whole, tensor, start))
                start += every[part].tensor.shape[0]
            del every[whole]
        self.slots |= {(component, name): slot for name, slot in every.items()}
        self._groups |= offload_groups(network)
        if sharding_modules(network):
            self._sharded.add(component)

    def layout(self) -> dict[TensorKey, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {key: self.shape(key) for key in self.slots}

    def shape(self, key: TensorKey) -> tuple[int, ...]:
        """Return the shape of a tensor, as adapters see it."""
        layer = self.layers.get(key)
        return tuple(self.slots[key].tensor.shape) if layer is None else layer.shape

    def dtype(self, key: TensorKey) -> torch.dtype:
        """Return the dtype in which sums are rounded: float32 for a layer that is quantized again."""
        return torch.float32 if key in self.layers else self.home(key).tensor.dtype

    def canonical(self, key: TensorKey) -> TensorKey:
        """Return the first name of the place that ``key`` names."""
        slot = self.slots.get(key)
        return key if slot is None else self.first[id(slot.module), slot.leaf]

    def shared(self, key: TensorKey) -> list[str]:
        """Return the names of other modules' tensors that share memory with this one."""
        group = self._shared.get(self.canonical(key), ())
        return [name if component == key[0] else f"{component}.{name}" for component, name in group]

    def home(self, key: TensorKey) -> LiveHome:
        """Return where the numbers of a tensor are stored; raise `TargetError` if they cannot be written."""
        known = self._homes.get(key)
        if known is None:
            known = self._homes[key] = self._find(key)
        return known

    def is_at(self, key: TensorKey, mark: Mark) -> bool:
        """Return whether a tensor is as it was marked; False for one that cannot be written at present."""
        try:
            return self.home(key).mark() == mark
        except TargetError:
            return False

    def refuse_remains(self, key: TensorKey, mark: Mark) -> None:
        """Raise where a weight without a place under its name still acts: its module computes it, or another one
        holds it.
        """
        network, (path, _, leaf) = self.networks[key[0]], key[1].rpartition(".")
        (_, place, _, _), _ = mark
        computed = any(hasattr(module, leaf) for name, module in named_modules(network) if name == path)
        if computed or any(place == address(tensor) for tensor in (*network.parameters(), *network.buffers())):
            raise MergeStateError(
                f"{key[1]}: wrapped, quantized or parametrized while adapters were merged, so it cannot be restored; "
                "undo that and call apply([]), or build the model again; call apply([]) before changing modules"
            )

    def refuse_quantized(self, keys: Collection[TensorKey]) -> None:
        """Raise for weights that were quantized, or dequantized, while adapters were merged into them."""
        if keys:
            raise MergeStateError(
                f"{min(keys)[1]}: quantized, or no longer so, while adapters were merged, so it cannot be restored; "
                "build the model again; call apply([]) before quantizing layers"
            )

    def unwritable(self) -> list[str]:
        """Return one line per reason why weights take no adapters: not floating-point, or computed from others."""
        reasons = [
            f"{key[1]} is stored as {str(tensor.dtype).removeprefix('torch.')} (quantized)"
            for key, tensor in self._quantized.items()
        ]
        for network in self.networks.values():
            for name, module in named_modules(network):
                if any(leaf in module._parameters for leaf in ("weight_g", "weight_orig")):
                    reasons.append(f"{name}.weight is computed for every forward pass")
                elif torch.nn.utils.parametrize.is_parametrized(module):
                    computed = next(iter(module.parametrizations))  # type: ignore[arg-type]
                    reasons.append(f"{name}.{computed} is parametrized, so computed for every forward pass")
        more = f" (and {len(reasons) - 1} more weights)" if len(reasons) > 1 else ""
        return [f"{reasons[0]}{more}: no adapter can be merged into it"] if reasons else []

    def untie(self, key: TensorKey) -> None:
        """Give the module a tensor of its own, with the same bits; the others keep theirs."""
        slot = self.slots[key]
        if slot.tensor.is_meta:
            raise TargetError(f"{key[1]}: tied, and stored by an offload hook; untie it before it is offloaded")
        copy = slot.tensor.detach().clone()
        if isinstance(slot.tensor, nn.Parameter):
            slot.module._parameters[slot.leaf] = nn.Parameter(copy, requires_grad=slot.tensor.requires_grad)
        else:
            slot.module._buffers[slot.leaf] = copy
        self.look()

    def _find(self, key: TensorKey) -> LiveHome:
        slot = self.slots[key]
        if key in self.layers and not slot.tensor.is_meta:
            memory = packed_memory(self.layers[key])
            place = (id(self.layers[key]), memory.data_ptr(), memory.dtype, memory.device)
            return LiveHome(memory, slot.tensor, (), place, not slot.tensor.is_inference())
        owner = self._kept_by_hook(key) if slot.tensor.is_meta else slot.tensor
        if owner is None:
            raise TargetError(f"{key[1]}: on the meta device, so it has no numbers; load the model's weights first")
        if holds_others(owner) or key[0] in self._sharded:
            state = "sharded by FSDP" if key[0] in self._sharded else f"stored as {class_of(owner)}"
            raise TargetError(
                f"{key[1]}: {state}, which cannot be written in place; build the model with the adapters merged "
                "(MergedSource) before quantizing or sharding it, or use inweave.attach"
            )
        if owner.layout != torch.strided:
            raise TargetError(f"{key[1]}: a sparse tensor, which cannot be written in place; make it dense first")
        if any(stride == 0 and size > 1 for stride, size in zip(owner.stride(), owner.shape, strict=True)):
            raise TargetError(f"{key[1]}: an expanded view: several elements are one number; give it memory of its own")
        if reason := elsewhere(self._groups.get(id(slot.tensor)), slot.tensor):
            raise TargetError(f"{key[1]}: {reason}")
        place = (id(owner), owner.data_ptr(), owner.dtype, owner.device)
        return LiveHome(owner.detach(), owner, tuple(self._copies(key, owner)), place, not owner.is_inference())

    def _kept_by_hook(self, key: TensorKey) -> torch.Tensor | None:
        """Return the tensor that accelerate loads for each forward pass; raise `TargetError` if it is on disk."""
        path = key[1].split(".")
        module, above = self.networks[key[0]], list[nn.Module]()
        for step in path[:-1]:
            above.append(module)
            module = unwrapped(module).get_submodule(step)
        for count, holder in reversed([*enumerate([*above, module])]):
            for weights, name in weight_maps(holder, ".".join(path[count:])):
                if (stored := in_memory(weights, name)) is not None:
                    return stored
                raise TargetError(f"{key[1]}: {ON_DISK} or build the model with the adapters merged (MergedSource)")
        return None

    def _copies(self, key: TensorKey, owner: torch.Tensor) -> Iterator[torch.Tensor]:
        for whole, tensor, start in self._rows.get(key, ()):
            rows = tensor.detach()[start : start + owner.shape[0]]
            if tensor.is_meta or rows.shape != owner.shape or not torch.equal(rows.to(owner), owner.detach()):
                raise TargetError(
                    f"{key[1]}: the model may compute with {whole} instead, which holds other weights; "
                    "call unfuse_qkv_projections() first"
                )
            yield rows

    def _overlaps(self) -> dict[TensorKey, list[TensorKey]]:
        """Return every place with those of other modules whose memory overlaps its own."""
        tensors = {key: self.visible(key) for key in self.first.values()}
        for (
            component,
            network,
        ) in self.networks.items():  # non-persistent buffers, and tensors that are not floating-point
            for path, module in named_modules(network):
                for leaf, buffer in module._buffers.items():
                    key = (component, f"{path}.{leaf}" if path else leaf)
                    layer = quantized_layer(module)
                    own = layer is not None and leaf in layer.weights._fields
                    if buffer is not None and key not in self.slots and not own:
                        tensors[key] = buffer
        return overlaps(tensors)

    def visible(self, key: TensorKey) -> torch.Tensor:
        """Return the tensor that holds a place's numbers, or the one on the meta device if they are on disk."""
        tensor = self.slots[key].tensor
        if not tensor.is_meta:
            return tensor
        try:
            stored = self._kept_by_hook(key)
        except TargetError:
            return tensor
        return tensor if stored is None else stored


def write_copies(homes: Iterable[LiveHome]) -> None:
    """Bring fused projections up to date with the parts they hold."""
    for home in homes:
        for copy in home.copies:
            copy.copy_(home.tensor)


def _entries_of(network: nn.Module, above: dict[int, tuple[Entry, nn.Module]]) -> list[Entry]:
    """Return the members of every module of a network; record in ``above`` where each module is held."""
    modules: list[nn.Module] = [network]
    entries: list[Entry] = []
    for module in modules:  # the list grows
        for members in (module._parameters, module._buffers):
            entries += [(members, name, tensor) for name, tensor in members.items()]
        for name, child in module._modules.items():
            entries.append((module._modules, name, child))
            if child is not None:
                above[id(child)] = entries[-1], module
                modules.append(child)
    return entries


def _fused(network: nn.Module, every: Mapping[str, Slot]) -> Iterator[tuple[str, list[str]]]:
    """Yield the tensors of fused projections with the parts whose rows they hold."""
    for path, module in named_modules(network):
        if not getattr(module, "fused_projections", False):
            continue
        dot = f"{path}." if path else ""
        for whole, parts in FUSED:
            for leaf in ("weight", "bias"):
                names = [f"{dot}{part}.{leaf}" for part in parts]
                if f"{dot}{whole}.{leaf}" in every and all(name in every for name in names):
                    yield f"{dot}{whole}.{leaf}", names
