"""A built model: its networks with live weights, and the weaver that swaps adapters in them.

    load_model("inweave/emoji", loras=[("style.safetensors", 0.8)])

Every network is made on the meta device and filled from a source that merges the adapters on the way, text
encoders included. Afterwards `swap` changes the stack in place.

Default precision: float32 on the CPU; on a GPU bfloat16 where it is supported, else float16; an autoencoder whose
configuration asks for it (`force_upcast`: SDXL's) stays in float32.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from inweave.adapter import Adapter
from inweave.adapter.components import FOLDERS
from inweave.errors import MergeStateError
from inweave.models.acceleration import accelerate
from inweave.models.blueprint import Blueprint
from inweave.models.configuration import library_errors
from inweave.models.construct import on_meta as on_meta
from inweave.models.families.base import ENCODERS, Family
from inweave.models.naming import Cast, under_names_of
from inweave.models.offload import Offloader
from inweave.models.open import open_model
from inweave.models.quantized_cache import CachedBase
from inweave.models.recorded import RecordedDenoiser
from inweave.models.samplers import own_scheduler
from inweave.models.tokenizers import check_tokenizer
from inweave.models.vae import LatentSpace, latent_space
from inweave.ops.tensors.device import choose_device, choose_dtype
from inweave.targets.index import ModelIndex, component_from_names
from inweave.targets.plan import Plan
from inweave.weights.build import build, stored_bytes
from inweave.weights.gc_pause import collector_waits
from inweave.weights.hold import held_summary, memory_summary, stored_quantized
from inweave.weights.merged import MergedSource
from inweave.weights.pristine import Keep
from inweave.weights.resolved import plans_of, resolve_all
from inweave.weights.row_adapters import RowAdapters
from inweave.weights.scratch import trim_heap
from inweave.weights.source import WeightSource
from inweave.weights.stack import StackItem
from inweave.weights.views import refuse_rewritten
from inweave.weights.weaver import Weaver

#: how a denoiser is loaded: unpacked, as its file stores it, or in a format
Quantize = Literal["off", "keep", "fp8", "int8", "int8-hadamard", "nf4", "nf4-hadamard"]
#: the most of an adapter's change that requantizing a weight may lose; above it, it is computed beside the weight
MAX_LOSS = 0.25


@dataclass(eq=False)
class Model:
    """A model in memory; ``networks`` and ``tokenizers`` go by the folder names of diffusers."""

    blueprint: Blueprint
    networks: dict[str, nn.Module]
    tokenizers: dict[str, Any]
    weaver: Weaver | None  # None after `release_weaver`
    device: torch.device
    dtype: torch.dtype
    unpacked: int = 0  # weights that the files store quantized, and that are in `dtype` here
    quantized: Quantize = "off"
    quantizing: str = ""  # what quantizing the denoiser changed
    offloader: Offloader | None = None  # if the networks are in host memory, but for those that compute
    recorded: RecordedDenoiser | None = None  # the denoiser in CUDA graphs

    @property
    def name(self) -> str:
        return self.blueprint.name

    @property
    def family(self) -> Family:
        return self.blueprint.family

    @property
    def denoiser(self) -> Any:
        return self.networks[self.blueprint.denoiser.folder]

    @property
    def vae(self) -> Any:
        return self.networks["vae"]

    @property
    def tokenizer(self) -> Any:
        return self.tokenizers["tokenizer"]

    @cached_property
    def scheduler(self) -> Any:
        """The schedule the model was trained with."""
        return own_scheduler(self.blueprint.scheduler)

    @cached_property
    def latent_space(self) -> LatentSpace:
        return latent_space(self.vae)

    @property
    def latent_scale(self) -> int:
        """Pixels per latent, along each side."""
        return self.latent_space.scale

    @property
    def quantization(self) -> str:
        """How quantized weights are in memory; "" if none is quantized."""
        kind = str(self.dtype).removeprefix("torch.")
        unpacked = f'{self.unpacked} quantized weights were unpacked to {kind}; quantize = "keep" leaves them quantized'
        return self.quantizing or held_summary(self.networks) or (unpacked if self.unpacked else "")

    @property
    def rounding_loss(self) -> dict[str, float]:
        """The fraction of the adapters' change that each quantized weight could not hold."""
        return {} if self.weaver is None else self.weaver.rounding_loss

    @property
    def patch(self) -> int:
        """Width and height in pixels must be multiples of this."""
        return self.latent_scale * self.family.latent_patch

    @property
    def inpaints(self) -> bool:
        """Whether the denoiser takes a mask and the masked image along with the latents."""
        return self.family.masked_inputs and self.denoiser.config.in_channels == 2 * self.latent_space.channels + 1

    @property
    def size(self) -> int:
        """The side, in pixels, of the images the model was trained for."""
        variant, sample = self.blueprint.variant, self.denoiser.config.get("sample_size") or 128
        if variant is not None:
            return variant.size
        return int(sample * self.latent_scale // self.latent_space.patch) if isinstance(sample, int) else 1024

    @property
    def prediction(self) -> str:
        """The prediction type of the denoiser: epsilon, v_prediction, or flow."""
        return str(self.blueprint.scheduler.get("prediction_type", "flow" if self.flow else "epsilon"))

    @property
    def flow(self) -> bool:
        """Whether it was trained by flow matching."""
        return self.family.flow

    @property
    def zero_snr(self) -> bool:
        """Whether its last training step is pure noise (zero terminal SNR)."""
        return bool(self.blueprint.scheduler.get("rescale_betas_zero_snr"))

    def predict(self, latents: Tensor, t: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the denoiser's prediction for noisy latents at time ``t``, recorded where it can be."""
        refuse_rewritten(self.blueprint.denoiser.source)
        graph = self.recorded
        return self.family.denoise(self, latents, t, inputs) if graph is None else graph(latents, t, inputs)

    def using(self, *folders: str) -> AbstractContextManager[None]:
        """Have these networks on the device inside the block; they are always there unless they are offloaded.

        Raises:
            FormatError: their weights are views of a file that was written to.
        """
        self.check_files(*folders)
        return nullcontext() if self.offloader is None else self.offloader.using(*folders)

    def check_files(self, *folders: str) -> None:
        """Raise FormatError if weights of these networks are views of a file that was written to."""
        for folder in folders:
            if folder in self.blueprint.parts:
                refuse_rewritten(self.blueprint.parts[folder].source)

    def swap(self, stack: Iterable[StackItem]) -> int:
        """Make the weights those of ``stack``, in place; returns how many tensors were written."""
        return self._live_weaver().apply(stack)

    def plan(self, adapter: Adapter | str | os.PathLike[str], *, strict: bool = True) -> Plan:
        """Return where an adapter goes in this model; with ``strict``, raise TargetError unless all of it fits."""
        return self._live_weaver().plan(adapter, strict=strict)

    def holds(self, adapter: str | os.PathLike[str]) -> bool:
        """Return whether an adapter file is in memory, ready to be merged."""
        return self.weaver is not None and self.weaver.holds(adapter)

    @property
    def lora_modules(self) -> int:
        """How many modules an adapter could change: those with a weight of two dimensions or more."""
        components = self._live_weaver().index.components.values()
        return sum(
            name.endswith(".weight") and len(shape) > 1
            for component in components
            for name, shape in component.shapes.items()
        )

    @cached_property
    def row_adapters(self) -> RowAdapters:
        """Adapters that rows of a batch have besides those that are merged."""
        return RowAdapters(self._live_weaver())

    def release_weaver(self) -> None:
        """Drop the weaver and its original weights: training swaps no adapters, and networks move."""
        self.weaver = None
        self.__dict__.pop("row_adapters", None)  # which holds the weaver

    def _live_weaver(self) -> Weaver:
        if self.weaver is None:
            raise MergeStateError(f"{self.name} is being trained; load it again to swap adapters in it")
        if self.offloader is not None:
            self.offloader.rest()
        return self.weaver


def load_model(
    where: str | os.PathLike[str] | Blueprint,
    *,
    loras: Iterable[StackItem] = (),
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    vae_dtype: str | torch.dtype | None = None,
    variant: str | None = None,
    config: str | os.PathLike[str] | None = None,
    parts: Mapping[str, str | os.PathLike[str]] | None = None,
    keep: Keep = "auto",
    quantized: Quantize = "off",
    offload: bool = False,
    allow_download: bool = False,
    progress: Callable[[str, int, int], object] | None = None,
    arrived: Callable[[str, nn.Module, str], object] | None = None,
    cached: CachedBase | None = None,
    on_quantized: Callable[[nn.Module, str], object] | None = None,
    accelerated: bool = False,
    lora_bytes: int = 4 * 1024**3,
) -> Model:
    """Open and build a model, with adapters merged while its weights load.

    ``quantized``: "keep" leaves the weights that a file stores quantized like that, "off" unpacks them; a format, such
    as "int8", quantizes the denoiser layer by layer before it moves to the device, and adapters are merged into that
    (`Model.quantization` says what is quantized).

    ``offload``: all weights stay in host memory, in which no file is mapped; networks move to the device while they
    compute, blocks one by one (`Model.using`), and adapters are merged on the host.

    ``progress`` is called with the part that is being loaded, and how many bytes of all parts are loaded.
    ``arrived``: see `build`, with the folder and the network before the name; then there is no weaver.
    ``cached``: the denoiser's weights as they were quantized before. ``on_quantized``: called with the denoiser and a
    note once it was quantized, before adapters are merged. ``accelerated``: see `accelerate`. ``lora_bytes``: the most
    memory for adapters that were read.
    """
    blueprint = where if isinstance(where, Blueprint) else open_model(
        where, variant=variant, config=config, parts=parts, allow_download=allow_download
    )  # fmt: skip
    target = choose_device(device)
    precision = choose_dtype(dtype, target)
    vae_precision = torch.float32 if blueprint.parts["vae"].config.get("force_upcast") else precision
    vae_precision = choose_dtype(vae_dtype, target) if vae_dtype else vae_precision
    with collector_waits():
        networks = {folder: on_meta(part) for folder, part in blueprint.parts.items()}
        own = "" if quantized in ("off", "keep") else blueprint.denoiser.folder
        if own or cached is not None:
            from inweave.models.quantization import Quantizer, join_groups, refuse_format  # needs `inweave.layers`
        if own:
            refuse_format(networks[own], quantized, target, precision)
        home = torch.device("cpu") if offload else target
        sources = {folder: under_names_of(networks[folder], part.source) for folder, part in blueprint.parts.items()}
        index = _index(sources, blueprint)
        layers = list(loras)
        stack = resolve_all(layers, index)
        plans = plans_of(stack)
        note, loaded = "", 0
        total = sum(stored_bytes(source, name) for source in sources.values() for name in source.names())
        for folder, network in networks.items():
            source = sources[folder]
            component = FOLDERS.get(folder)
            if layers and component is not None and quantized == "off":
                source = MergedSource(Cast(source, precision), plans, component=component, index=index)

            def count(size: int, folder: str = folder) -> None:
                nonlocal loaded
                loaded += size
                if progress is not None:
                    progress(folder, loaded, total)

            count(0)
            part_dtype = vae_precision if folder == "vae" else precision
            known = cached if folder == blueprint.denoiser.folder else None
            source = source if known is None else known.over(source)
            place, form = "cpu" if folder == own else home, "keep" if quantized == "keep" or known else "off"
            quantizer = Quantizer(network, quantized, target, home) if folder == own and known is None else None
            on_arrival: Callable[[str], object] | None = None if quantizer is None else quantizer.arrived
            if arrived is not None:
                on_arrival = partial(arrived, folder, network)
            build(
                network, source, device=place, dtype=part_dtype, quantized=form,  # type: ignore[arg-type]
                progress=count, arrived=on_arrival, mapped=not offload and folder != own,
            )  # fmt: skip
            with library_errors(f"{blueprint.name}: {folder}: its configuration cannot be used"):
                blueprint.family.complete(folder, network)
            _make_contiguous(network)
            network.eval().requires_grad_(False)
            if quantizer is not None or known is not None:
                network.to(home)
                join_groups(network)
                trim_heap()
                text = quantizer.note() if quantizer is not None else known.note if known is not None else ""
                note = f"{text}: {memory_summary({folder: network})}"
                if known is not None:
                    known.ensure_used(network)
                elif on_quantized is not None:
                    on_quantized(network, text)
    if accelerated:
        accelerate(networks, blueprint.denoiser.folder)
    woven = {FOLDERS[folder]: network for folder, network in networks.items() if folder in FOLDERS}
    origins = {FOLDERS[folder]: source for folder, source in sources.items() if folder in FOLDERS}
    weaver: Weaver | None
    if arrived is not None:  # the weights are not those of the files any more
        weaver = None
    elif quantized == "off":
        weaver = Weaver(woven, sources=origins, keep=keep, cache_bytes=lora_bytes, built_with=stack.result())
    else:  # changes of a quantized weight need its stored bits
        weaver = Weaver(woven, sources=origins, keep=keep, cache_bytes=lora_bytes, max_loss=MAX_LOSS)
        weaver.apply([(each.plan, each.strength) for each in stack.result()])
    tokenizers = {}
    for folder, make in blueprint.tokenizers.items():
        if (encoder := networks.get(folder.replace("tokenizer", "text_encoder"))) is not None:
            tokenizers[folder] = make()
            check_tokenizer(f"{blueprint.name}: {folder}", tokenizers[folder], encoder)
    with library_errors(f"{blueprint.name}: vae: its configuration cannot be used"):
        latent_space(networks["vae"])
    unpacked = sum(stored_quantized(source) for source in sources.values()) if quantized == "off" else 0
    offloader = _offloader(blueprint, networks, target) if offload else None
    return Model(blueprint, networks, tokenizers, weaver, target, precision, unpacked, quantized, note, offloader)


def _offloader(blueprint: Blueprint, networks: Mapping[str, nn.Module], device: torch.device) -> Offloader:
    """Return what moves the networks to the device while they compute; the VAE as a whole, the others by blocks."""
    family = blueprint.family
    blocks = {folder: family.blocks(network) for folder, network in networks.items() if folder != "vae"}
    return Offloader(networks, device, blocks, advice="quantize the denoiser, or make smaller images")


def file_index(model: Model) -> ModelIndex:
    """Return the index that adapters for this model are written against: the usual names in files."""
    return blueprint_index(model.blueprint)


def blueprint_index(blueprint: Blueprint) -> ModelIndex:
    """Return `file_index` of a model before it is loaded."""
    components = {}
    for folder, part in blueprint.parts.items():
        if folder not in FOLDERS:
            continue
        shapes = {name: part.source.spec(name).shape for name in part.source.names()}
        if part.class_name.startswith("CLIPText") and not any(name.startswith("text_model.") for name in shapes):
            root = ("text_projection", "logit_scale")
            shapes = {n if n.startswith(root) else f"text_model.{n}": shape for n, shape in shapes.items()}
        components[FOLDERS[folder]] = component_from_names(FOLDERS[folder], shapes)
    base = blueprint.variant.tensors if blueprint.variant is not None else None
    return ModelIndex(components, base, blueprint.name)


def _index(sources: Mapping[str, WeightSource], blueprint: Blueprint) -> ModelIndex:
    """Return the modules that an adapter may name, under the names of the live networks."""
    components = {
        FOLDERS[folder]: component_from_names(
            FOLDERS[folder], {name: source.spec(name).shape for name in source.names()}
        )
        for folder, source in sources.items()
        if folder == blueprint.denoiser.folder or folder in ENCODERS
    }
    base = blueprint.variant.tensors if blueprint.variant is not None else None
    return ModelIndex(components, base, blueprint.name)


def _make_contiguous(network: nn.Module) -> None:
    """Copy weights that were stored transposed: with other strides, the same numbers are summed in another order."""
    for weight in network.parameters():
        if not weight.is_contiguous():
            weight.data = weight.data.contiguous()
