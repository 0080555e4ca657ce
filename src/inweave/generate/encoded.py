"""Encoded prompts, kept from request to request while the text encoders are what they were.

    kept       by everything that encoding reads from a request: texts with their weights, guidance, size, CLIP skip
    dropped    all of them, once anything of an encoder differs: a module, hook, setting, address of a tensor or the
               number of writes to it (`NetworkState`, versions), or a Weaver wrote to an encoder of its name anywhere
    never      of encoders that are trained, or that adapters are added to; of requests with reference images, and of
               models that are run by their own pipelines

A Weaver may write by kernels that count no versions, so its writes are counted by themselves (`count_writes`): adapters
that change the denoiser alone keep what was encoded. At most `MOST_BYTES`, then the least recently used leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from inweave.adapter.components import FOLDERS
from inweave.models.families.conditioning import Conditioning, ConditioningRequest
from inweave.models.model import Model
from inweave.models.recorded import NetworkState
from inweave.weights.stack_state import writes_to

MOST, MOST_BYTES = 64, 64 * 1024**2


class EncodedPrompts:
    """What the encoders of one model gave; ``hits``: how often that was taken instead of encoding."""

    def __init__(self) -> None:
        self.hits = 0
        self._entries: OrderedDict[ConditioningRequest, Conditioning] = OrderedDict()
        self._state: _EncoderState | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """The memory of what is kept."""
        return sum(_bytes(each) for each in self._entries.values())

    def get(self, model: Model, request: ConditioningRequest, encode: Callable[[], Conditioning]) -> Conditioning:
        """Return the conditioning of a request, by ``encode`` if it is not kept."""
        encoders = {name: network for name, network in model.networks.items() if name in _encoders(model)}
        fixed = model.weaver is not None and not (model.family.own_pipeline or torch.is_inference_mode_enabled())
        if request.references or not fixed or not _counts_writes(encoders.values()):
            return encode()
        if self._state is None or not self._state.holds(encoders):
            self._entries.clear()
            self._state = _EncoderState(encoders)
        if (entry := self._entries.get(request)) is not None:
            self._entries.move_to_end(request)
            self.hits += 1
            return entry
        made = self._entries[request] = encode()
        if not self._state.holds(encoders):  # encoding changed something: not to be kept
            del self._entries[request]
        while len(self._entries) > MOST or self.bytes > MOST_BYTES:
            self._entries.popitem(last=False)
        return made


class _EncoderState:
    """What the output of encoders depends on besides a request."""

    def __init__(self, encoders: dict[str, nn.Module]) -> None:
        self._networks = list(encoders.items())
        self._states = [NetworkState(network) for network in encoders.values()]
        self._tensors = [tensor for network in encoders.values() for tensor in _tensors(network)]
        self._writes = self._count()

    def _count(self) -> list[int]:
        woven = [writes_to(FOLDERS[name]) for name, _ in self._networks if name in FOLDERS]
        return [*woven, *(tensor._version for tensor in self._tensors)]

    def holds(self, encoders: dict[str, nn.Module]) -> bool:
        """Return whether all of it is as it was."""
        same = list(encoders) == [name for name, _ in self._networks]
        same = same and all(network is encoders[name] for name, network in self._networks)
        return same and all(state.holds() for state in self._states) and self._count() == self._writes


#: what is kept of each model
_OF: WeakKeyDictionary[Model, EncodedPrompts] = WeakKeyDictionary()


def encoded_prompts(model: Model) -> EncodedPrompts:
    """Return what is kept of a model."""
    return _OF.setdefault(model, EncodedPrompts())


def _encoders(model: Model) -> set[str]:
    return set(model.networks) - {"vae", model.blueprint.denoiser.folder}


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]


def _counts_writes(encoders: Iterable[nn.Module]) -> bool:
    return not any(tensor.is_inference() for network in encoders for tensor in _tensors(network))


def _bytes(conditioning: Conditioning) -> int:
    tensors = {id(each): each for each in (*conditioning.inputs.values(), *conditioning.text.values())
               if torch.is_tensor(each)}  # fmt: skip
    return sum(tensor.nbytes for tensor in tensors.values())
