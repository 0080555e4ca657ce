"""Writing the tensors of a live model: originals saved first, then merged or restored, in place.

prepare   everything that can fail before a weight is touched
write     the kernel for all plain LoRA pairs whose originals are on the device, otherwise one tensor at a time
restore   the original bits
rebuilt   the result of `write` in other memory: to put a stack back, or to recognize one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from inweave.errors import MemoryBudgetError, TargetError
from inweave.ops.common.select import has_kernels
from inweave.ops.merge import WeightUpdate, all_usable, merge_products, usable_numbers
from inweave.ops.quantized import has_encoder
from inweave.weights.beside import LowRank, put_beside, take_away
from inweave.weights.factors import LoadedAdapter, targets_of
from inweave.weights.live import LiveModel
from inweave.weights.marks import Marks
from inweave.weights.merge import is_product, merge_into
from inweave.weights.pristine import Pristine
from inweave.weights.quantized import encoded, lost_share, weight_in, write_weight
from inweave.weights.scratch import Scratch
from inweave.weights.stack import Item, TensorKey


class Targets:
    """Tensors that are written together, looked up once. Valid until the model or an original changes."""

    def __init__(self, keys: Iterable[TensorKey], live: LiveModel) -> None:
        self.homes = {key: live.home(key) for key in keys}
        self.keys = frozenset(self.homes)
        self.copied = [home for home in self.homes.values() if home.copies]
        self._of = keys  # held, so that its id stays unique
        self._pairs: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def joined(self, others: Collection[TensorKey], live: LiveModel) -> Targets:
        """Return these tensors and others."""
        return Targets([*self.homes, *others], live) if others else self

    def originals(self, keys: Collection[TensorKey], writer: Writer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return some of the tensors, and the original of each; remembered for all of them at once."""
        whole = len(keys) == len(self.homes)
        if not whole or self._pairs is None:
            lives = {key: self.homes[key].tensor for key in keys}
            pairs = [*lives.values()], [writer.pristine[key[0]].get(key[1], live) for key, live in lives.items()]
            if not whole:
                return pairs
            self._pairs = pairs
        return self._pairs


class Writer:
    """Writes tensors. ``pristine``: the originals per network; ``as_built``: tensors merged while the model was
    built.
    """

    def __init__(
        self, live: LiveModel, pristine: Mapping[str, Pristine], *, untie: bool, max_loss: float | None = None
    ) -> None:
        self.live = live
        self.pristine = pristine
        self.marks = Marks(live)
        self.as_built: set[TensorKey] = set()
        self.rounding_loss: dict[TensorKey, float] = {}  # of quantized weights, as a fraction of the change
        self.side_products: dict[TensorKey, LowRank] = {}  # changes that are computed beside such a weight
        self._max_loss = math.inf if max_loss is None else max_loss
        self._untie = untie

    def tensor(self, key: TensorKey) -> torch.Tensor:
        """Return the tensor to write."""
        return self.live.home(key).tensor

    def prepare(
        self, keys: Sequence[TensorKey], items: Mapping[TensorKey, Sequence[Item]], uncertain: frozenset[TensorKey]
    ) -> None:
        """Refuse what cannot be written, and save the originals of all tensors but ``uncertain`` ones, which have
        theirs.
        """
        for key in keys:
            self._refuse_misfits(key, items.get(key, ()))
        for key in keys:
            self._refuse_shared(key)
        homes = {key: self.live.home(key) for key in keys}
        self.check_sources()
        for key, home in homes.items():
            if key not in uncertain:
                self.pristine[key[0]].save(key[1], home.tensor)
                if key not in self.marks:
                    self.marks.set(key, home.mark())

    def check_sources(self) -> None:
        """Raise if originals would have to come from a file that has changed."""
        for pristine in self.pristine.values():
            pristine.check()

    def _refuse_misfits(self, key: TensorKey, items: Sequence[Item]) -> None:
        component, tensor = key
        slot = self.live.slots.get(key)
        if slot is None and any(item.placement.creates for item in items):
            raise TargetError(
                f"{tensor}: this adapter adds a bias to a layer that has none; use attach, or build the model from a "
                "MergedSource of it"
            )
        if slot is None:
            raise TargetError(f"{component}.{tensor}: not a tensor of this model; the plan was made for another base")
        if (layer := self.live.layers.get(key)) is not None and not has_encoder(layer.quantized):
            if not all(is_product(item.placement) for item in items):
                raise TargetError(
                    f"{tensor}: stored as {layer.quantized.format()}, which takes plain LoRA only, computed beside it; "
                    "load the model unpacked for other algorithms"
                )
        for item in items:
            placement, shape = item.placement, self.live.shape(key)
            if placement.widen or placement.creates:
                raise TargetError(
                    f"{tensor}: this adapter changes the model's shape; build the model from a MergedSource of it"
                )
            if placement.shape != shape:
                raise TargetError(f"{tensor}: the plan expects {list(placement.shape)}, the model has {list(shape)}")

    def _refuse_shared(self, key: TensorKey) -> None:
        others = self.live.shared(key)
        if not others:
            return
        if not self._untie:
            raise TargetError(
                f"{key[1]}: tied: it shares its memory with {', '.join(others)}, which would change with it; "
                f"Weaver(..., untie=True) gives {key[1]} a copy of its own"
            )
        self.live.untie(key)

    def write(
        self, keys: Sequence[TensorKey], items: Mapping[TensorKey, Sequence[Item]], owners: Mapping[int, LoadedAdapter]
    ) -> list[TensorKey]:
        """Write every tensor; returns those with numbers beyond the limit."""
        targets: list[tuple[TensorKey, WeightUpdate]] = []
        unbounded: list[TensorKey] = []
        scratch = Scratch()  # for all tensors of this stack
        for key in keys:
            if self.groupable(key, items[key]):
                targets += [(key, target) for target, _ in self.targets(key, items[key], owners)]
            elif not self.write_one(key, items[key], scratch):
                unbounded.append(key)
        unbounded += [targets[number][0] for number in merge_products([target for _, target in targets])]
        return list(dict.fromkeys(unbounded))

    def write_one(self, key: TensorKey, received: Sequence[Item], scratch: Scratch) -> bool:
        """Write one tensor; returns whether its numbers are within the limit."""
        if key in self.live.layers:
            loss = self._write_quantized(key, received, self.tensor(key), scratch)
            if loss is not None:
                self.rounding_loss[key] = loss
            return loss is not None
        original = self._reader(key[0])
        merge_into(self.tensor(key), original(key[1]), received, original, scratch=scratch)
        return all_usable(self.tensor(key))

    def _write_quantized(
        self, key: TensorKey, received: Sequence[Item], out: torch.Tensor, scratch: Scratch | None = None
    ) -> float | None:
        """Write a quantized weight to ``out``; return its rounding loss, or None if a number is beyond the limit."""
        read = self._reader(key[0])
        before = read(key[1]).to(out.device)
        total = torch.empty_like(before)
        merge_into(total, before, received, read, scratch=scratch)
        usable, products = all_usable(total), all(is_product(item.placement) for item in received)
        if not usable and all_usable(before):
            return None
        if not usable and not products:
            raise TargetError(f"{key[1]}: stored with numbers that are not finite; use a base without them")
        layer = self.live.layers[key]
        self._forget_beside(key)
        if torch.equal(total, before):  # factors of zeros: the numbers of some layouts would be rounded again
            out.copy_(self.pristine[key[0]].get(key[1], self.tensor(key)))
            return 0.0
        new = encoded(layer, total) if usable else None  # with NaN there would be no scales
        loss = math.inf if new is None else lost_share(new, total, before)
        if new is None or (loss > self._max_loss and products):
            out.copy_(self.pristine[key[0]].get(key[1], self.tensor(key)))
            self.side_products[key] = put_beside(layer, received)
            return 0.0
        write_weight(layer, out, new)
        return loss

    def _forget_beside(self, key: TensorKey) -> None:
        if self.side_products.pop(key, None) is not None and key in self.live.layers:
            take_away(self.live.layers[key])

    def _reader(self, component: str) -> Callable[[str], torch.Tensor]:
        def original(name: str) -> torch.Tensor:
            key = self.live.canonical((component, name))
            live = self.tensor(key)
            stored = self.pristine[component].get(name, live).to(live.device)
            layer = self.live.layers.get(key)
            return stored if layer is None else weight_in(layer, stored).dequantized(torch.float32).view(layer.shape)

        return original

    def groupable(self, key: TensorKey, received: Sequence[Item]) -> bool:
        """Return whether the kernel can merge a tensor: only products, and the original on the same device."""
        live = self.tensor(key)
        return self.pristine[key[0]].is_resident(key[1], live) and _kernel_takes(live, received)

    def targets(
        self, key: TensorKey, received: Sequence[Item], owners: Mapping[int, LoadedAdapter]
    ) -> list[tuple[WeightUpdate, list[Item]]]:
        live = self.tensor(key)
        return targets_of(self.pristine[key[0]].get(key[1], live), live, received, owners)

    def forget(self, keys: Iterable[TensorKey]) -> None:
        """Take the present numbers of these tensors as their originals."""
        for key in keys:
            self.rounding_loss.pop(key, None)
            self._forget_beside(key)
            self.pristine[key[0]].forget(key[1])
            self.marks.drop(key)

    def convert(self, key: TensorKey) -> bool:
        """Move and convert an original as its tensor was; return whether it is still one for this tensor."""
        live, pristine = self.tensor(key), self.pristine[key[0]]
        if pristine.get(key[1], live).shape != live.shape:
            return False
        pristine.convert(key[1], live)
        return True

    def restore_all(self, keys: Iterable[TensorKey]) -> None:
        """Write the original bits."""
        keys = list(keys)
        for key in keys:
            self._forget_beside(key)
        lives = {key: self.tensor(key) for key in keys}
        self._copy(([*lives.values()], [self.pristine[key[0]].get(key[1], live) for key, live in lives.items()]))

    def restore(self, targets: Targets, keys: Collection[TensorKey]) -> None:
        """Write the original bits of some of these tensors."""
        for key in self.side_products.keys() & keys:
            self._forget_beside(key)
        self._copy(targets.originals(keys, self))

    def _copy(self, pairs: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        if pairs[0]:
            torch._foreach_copy_(*pairs)

    def rebuilt(
        self, key: TensorKey, items: Sequence[Item], owners: Mapping[int, LoadedAdapter], out: torch.Tensor
    ) -> torch.Tensor:
        """Write a tensor with ``items`` merged in to ``out``, which has the dtype and device that it was written in."""
        if key in self.live.layers:
            self._write_quantized(key, items, out)
            return out
        pristine = self.pristine[key[0]]
        original = pristine.get(key[1], out).to(device=out.device, dtype=out.dtype)
        by_kernel = key in self.as_built or pristine.is_resident(key[1], out)
        if by_kernel and _kernel_takes(out, items):
            merge_products([target for target, _ in targets_of(original, out, items, owners)])
        else:
            merge_into(out, original, items, self._reader(key[0]))
        return out

    def overflows(self, key: TensorKey) -> bool:
        """Return whether numbers of a tensor are beyond the limit where those of its original are not."""
        live = self.tensor(key)
        original = self.pristine[key[0]].get(key[1], live).to(live.device)
        if key in self.live.layers:
            return bool(usable_numbers(self._reader(key[0])(key[1])).all())
        return bool((~usable_numbers(live) & usable_numbers(original)).any())


def _kernel_takes(tensor: torch.Tensor, received: Sequence[Item]) -> bool:
    plain = has_kernels(tensor) and tensor.is_contiguous() and tensor.dim() > 1
    return plain and all(is_product(item.placement) for item in received)


def as_memory_error(error: BaseException) -> BaseException:
    """Return a `MemoryBudgetError` for an out-of-memory error, and any other error unchanged."""
    if isinstance(error, torch.OutOfMemoryError):
        return MemoryBudgetError(f"no device memory for this stack; the base was restored: {error}")
    return error
