"""What a step keeps in memory, measured without any: the model's own networks, run on the meta device.

    blueprint ──networks without weights──► adapters ──one example forward (and backward)──► the highest water, the work

A `Meter` sees the same of real steps: what they keep, beside what was expected.

Every tensor an operation makes is counted from the moment it is made until its storage is gone, so what autograd keeps,
what checkpointing drops and what it computes again are all seen. Attention is taken to be fused, as it is on every GPU:
on the meta device torch would choose the plain one, which keeps tokens x tokens.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from inweave.layers import lora_layers
from inweave.models import vae
from inweave.models.blueprint import Blueprint
from inweave.models.model import Model, on_meta
from inweave.training.adapters.attach import add_networks
from inweave.training.config.schema import TrainConfig

_META = torch.device("meta")
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes; ``kept``: of one example, at the highest; ``encoding``: of one picture in the autoencoder.

    ``work``: additions and multiplications of one example, forward.
    """

    weights: Mapping[str, int]
    parameters: int
    kept: int
    encoding: int
    work: int = 0


def measure(
    blueprint: Blueprint,
    config: TrainConfig,
    dtype: torch.dtype,
    checkpoint: Callable[[Mapping[str, nn.Module]], None],
    trained: Callable[[Model, TrainConfig], dict[str, nn.Module]],
    *,
    again: bool,
    chunks: int = 1,
) -> Measured:
    """One example through forward; ``again``: backward too, where things are computed again (else it adds nothing).

    ``chunks``: of the text encoder that a caption takes.
    """
    model = blank(blueprint, dtype)
    weights = {folder: _bytes(network) for folder, network in model.networks.items()}
    parameters = _adapted(trained(model, config), config, checkpoint)
    side = (config.resolution or model.size) // model.patch * model.patch
    everything = list(model.networks.values())
    encoding = _highest(lambda: _encode(model, side), everything)
    counter = FlopCounterMode(display=False)
    kept = _highest(lambda: _step(model, config, (side, chunks), counter, again=again), everything)
    return Measured(weights, parameters, kept, encoding, counter.get_total_flops())


def measure_network(
    network: nn.Module,
    config: TrainConfig,
    checkpoint: Callable[[Mapping[str, nn.Module]], None],
    loss: Callable[[], torch.Tensor],
) -> Measured:
    """The same of one network on the meta device and the loss of one example on it, forward and backward.

    Of a language model the gradient of all those words is the highest point of a step.
    """
    weights = {"model": _bytes(network)}
    parameters = _adapted({"model": network}, config, checkpoint)
    counter = FlopCounterMode(display=False)

    def step() -> None:
        with counter:
            found = loss()
        torch.autograd.backward(found)

    return Measured(weights, parameters, _highest(step, [network]), 0, counter.get_total_flops())


def _bytes(network: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in network.parameters())


def _adapted(
    networks: Mapping[str, nn.Module], config: TrainConfig, checkpoint: Callable[[Mapping[str, nn.Module]], None]
) -> int:
    """Put the adapters on; how many numbers learn."""
    dora = config.network == "dora"  # starts from norms of weights, and there are none: its magnitudes come afterwards
    said = config.model_copy(update={"start_from": None} | ({"network": "lora"} if dora else {}), check=False)
    add_networks(networks, said)
    for network in networks.values():
        _finish(network, dora=dora)
    checkpoint(networks)
    return sum(p.numel() for network in networks.values() for p in network.parameters() if p.requires_grad)


def blank(blueprint: Blueprint, dtype: torch.dtype) -> Model:
    """The model in a precision, without weights; nothing of its files is read."""
    networks: dict[str, nn.Module] = {}
    for folder, part in blueprint.parts.items():
        wide = folder == "vae" and part.config.get("force_upcast")
        networks[folder] = _cast(on_meta(part), torch.float32 if wide else dtype).eval().requires_grad_(False)
    nothing: Any = None
    return Model(blueprint, networks, {}, nothing, _META, dtype)


def _cast(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Without the words diffusers has for `.to(dtype)`."""
    return network._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)  # type: ignore[no-untyped-call, no-any-return]


def _finish(network: nn.Module, *, dora: bool) -> None:
    """Adapters that were made with numbers join the rest; their gradients are there already, as in a run."""
    network._apply(lambda tensor: tensor.to(_META))  # type: ignore[no-untyped-call]
    for layer in lora_layers(network).values():
        for term in layer.adapters.values():
            if dora:
                term.magnitude = nn.Parameter(torch.empty(layer.out, device=_META))
            for parameter in term.parameters():
                parameter.grad = torch.empty_like(parameter)


@torch.no_grad()
def _encode(model: Model, side: int) -> None:
    vae.encode_distribution(model.vae, torch.empty(1, 3, side, side, dtype=model.vae.dtype, device=_META))


def _step(model: Model, config: TrainConfig, sizes: tuple[int, int], counter: FlopCounterMode, *, again: bool) -> None:
    side, chunks = sizes
    family = model.family
    latents = torch.empty(model.latent_space.shape(side, side), dtype=model.dtype, device=_META)
    with torch.set_grad_enabled(config.train_text_encoders):
        text = family.encode(model, family.example_ids(model, chunks, _META), config.clip_skip)
    inputs = family.batch_inputs(model, text, torch.empty(1, 6, device=_META), latents.shape, config.guidance)
    with counter:
        prediction = family.denoise(model, latents, torch.empty(1, device=_META), inputs)
    loss = prediction.float().square().mean()
    if again:
        torch.autograd.backward(loss)


def _highest(work: Callable[[], None], networks: Iterable[nn.Module]) -> int:
    """The most bytes alive at once during ``work``, without what is there before it."""
    water = _Water()
    for network in networks:
        for tensor in (*network.parameters(), *network.buffers()):
            water.ignore(tensor)
            if tensor.grad is not None:
                water.ignore(tensor.grad)
    with _fused_attention(), water:
        work()
    return water.peak


class Meter:
    """What the second step of a run keeps at its highest; the first one also makes what stays."""

    def __init__(self, device: torch.device, expected: int) -> None:
        self._device, self._expected, self._calls = device, expected, 0

    def __call__(self, step: Callable[[], None]) -> dict[str, Any] | None:
        """Do a step; what there is to say of it, once."""
        self._calls += 1
        if self._calls != 2:
            step()
            return None
        retries = self._retries()
        found = self._on_gpu(step) if self._device.type == "cuda" else self._on_cpu(step)
        told = f"a step keeps {found / 2**30:.2f} GiB; {self._expected / 2**30:.2f} were expected"
        if (again := self._retries() - retries) > 0:
            told += f"; {again} times memory was given back and taken anew to fit, which is slow: raise vram a little"
        return {"event": "memory", "text": told, "measured_bytes": found, "expected_bytes": self._expected}

    def _retries(self) -> int:
        """How often the allocator emptied its cache because it had reached the limit."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def _on_gpu(self, step: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        step()
        return int(torch.cuda.max_memory_allocated(self._device)) - before

    def _on_cpu(self, step: Callable[[], None]) -> int:
        water = _Water("cpu")
        with water:
            step()
        return water.peak


class _Water(TorchDispatchMode):
    """Counts the bytes of storages on a kind of device, from their first tensor to their end."""

    def __init__(self, kind: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def ignore(self, tensor: torch.Tensor) -> None:
        self._known[tensor.untyped_storage()._cdata] = None

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._kind != "meta":  # what is given and not known was there before, and results may be views of it
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._known:
                    self.ignore(tensor)
        found = operation(*args, **(kwargs or {}))
        for tensor in (found,) if isinstance(found, torch.Tensor) else tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._kind:
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def gone(_: object) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Attention on the meta device keeps its inputs, its result and one number a row; elsewhere it is what it was."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention.default
    with _LOCK:
        real = functional.scaled_dot_product_attention

        def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
            if not query.is_meta:
                return real(query, key, value, *rest, **options)
            return fused(query, key, value)[0]

        functional.scaled_dot_product_attention = attention
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = real
