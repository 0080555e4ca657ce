"""Which variant a single-file checkpoint holds, told from its tensors' names and shapes, and why.

    network   by its names      decided by
    UNet      input_blocks      width of the text it attends to: 768 SD 1.x, 1024 SD 2.x, 2048 SDXL
                                input channels: 4, or 9 with a mask and the masked picture (inpainting)
    SD3       joint_blocks      24 blocks: SD3 medium, with x_block.attn2 SD3.5 medium; 38: SD3.5 large
    FLUX      double_blocks     guidance_in: dev; without: schnell

Then every tensor of the denoiser is compared with the listing of that base, so a relative of another shape is
refused here and not built wrongly. What tensors cannot tell (velocity or noise in SD 2.x, Turbo or not) is taken
from marks and metadata in the file; where those say nothing, the evidence says what was assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from inweave.errors import FormatError
from inweave.models.variants import Prediction, Variant, find_variant
from inweave.targets import bases
from inweave.targets.index import DENOISER_TABLES, QUANTIZATION, SINGLE_FILE_PREFIXES
from inweave.targets.index import identify as table_of
from inweave.targets.links import Shape

_LOOKED_FOR = "a UNet (input_blocks), SD3 (joint_blocks) or FLUX (double_blocks)"
_WIDTHS = {768: "sd1.5", 1024: "sd2.1", 2048: "sdxl"}
_INPAINT = {"sd1.5": "sd1.5-inpaint", "sd2.1": "sd2-inpaint", "sdxl": "sdxl-inpaint"}
_TURBO = {"sdxl": "sdxl-turbo", "sd3.5-large": "sd3.5-large-turbo"}
_ENCODERS = {"te1": "text_encoder", "te2": "text_encoder_2", "te3": "text_encoder_3"}
_PREDICTIONS: dict[str, Prediction] = {
    "v": "v_prediction", "v_prediction": "v_prediction", "v-prediction": "v_prediction",
    "epsilon": "epsilon", "eps": "epsilon",
}  # fmt: skip
#: what the published names of architectures say about SD 2.x
_ARCHITECTURES: dict[str, Prediction] = {
    "stable-diffusion-v2-768-v": "v_prediction",
    "stable-diffusion-v2-512": "epsilon",
}


@dataclass(frozen=True, slots=True)
class Recognition:
    """``parts``: folder of a diffusers model -> prefix of its tensors in this file."""

    variant: Variant
    parts: Mapping[str, str]
    evidence: tuple[str, ...]


def recognise(shapes: Mapping[str, Shape], metadata: Mapping[str, str]) -> Recognition:
    """The variant in a checkpoint of these tensors; `FormatError` where it is none that inweave can build."""
    prefix, table, names = _denoiser(shapes)
    base, evidence = {"unet": _unet, "sd3": _sd3, "flux": _flux}[table](names)
    evidence += _verified(base, names)
    name, said = _turbo(base, metadata)
    variant = _known(name)
    if variant.family in ("sd", "sdxl"):
        variant, told = _prediction(variant, shapes, metadata)
        said += told
    folder = "unet" if table == "unet" else "transformer"
    return Recognition(variant, {folder: prefix, **_others(variant, shapes)}, (*evidence, *said))


def _denoiser(shapes: Mapping[str, Shape]) -> tuple[str, str, dict[str, Shape]]:
    """(prefix, table, tensors) of the diffusion model: under a prefix, or the whole file."""
    taken = tuple(prefix for prefix, _ in SINGLE_FILE_PREFIXES)
    bare = {name: shape for name, shape in shapes.items() if not name.startswith(taken)}
    candidates = [
        (prefix, {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)})
        for prefix, component in SINGLE_FILE_PREFIXES
        if component == "unet"
    ]
    for prefix, names in (*candidates, ("", bare)):
        table, naming = table_of(name for name in names if not name.endswith(QUANTIZATION))
        if table.name in ("unet", "sd3", "flux") and names:
            if naming == "diffusers":
                raise FormatError(
                    f"this is one network in diffusers names ({table.name}), not a single-file checkpoint; "
                    "give the diffusers folder it belongs to"
                )
            return prefix, table.name, names
        if table.name in DENOISER_TABLES and names:
            raise FormatError(
                f"a diffusion model of the family {table.name}; those that can be built are {_LOOKED_FOR}"
            )
    shown = ", ".join(list(shapes)[:3]) or "nothing"
    raise FormatError(
        f"no diffusion model found: looked for {_LOOKED_FOR}, under {taken[0]} or {taken[1]} or without a prefix; "
        f"the file has {len(shapes):,} tensors: {shown} ..."
    )


def _unet(names: Mapping[str, Shape]) -> tuple[str, list[str]]:
    width = next((shape[1] for name, shape in names.items() if name.endswith("attn2.to_k.weight")), 0)
    base = _WIDTHS.get(width)
    if base is None:
        raise FormatError(
            f"a UNet that attends to text of width {width}; known are 768 (SD 1.x), 1024 (SD 2.x), 2048 (SDXL)"
        )
    evidence = [f"UNet (input_blocks), text of width {width}: {base}"]
    sizes = names.get("label_emb.0.0.weight")
    if (sizes is not None) != (base == "sdxl"):
        raise FormatError(f"a UNet of {base}'s text width {'with' if sizes else 'without'} label_emb: no known model")
    channels = names.get("input_blocks.0.0.weight", (0, 0))[1]
    if channels == 9:
        base = _INPAINT[base]
        evidence.append("9 input channels (picture, mask, masked picture): inpainting")
    elif channels != 4:
        raise FormatError(f"a UNet of {base} with {channels} input channels; expected 4, or 9 for inpainting")
    return base, evidence


def _sd3(names: Mapping[str, Shape]) -> tuple[str, list[str]]:
    depth = len({name.split(".", 2)[1] for name in names if name.startswith("joint_blocks.")})
    twice = any(".x_block.attn2." in name for name in names)
    base = {(24, False): "sd3-medium", (24, True): "sd3.5-medium", (38, False): "sd3.5-large"}.get((depth, twice))
    found = f"joint_blocks of depth {depth} {'with' if twice else 'without'} x_block.attn2"
    if base is None:
        raise FormatError(
            f"SD3: {found}; known are depth 24 (SD3 medium), 24 with attn2 (SD3.5 medium), 38 (SD3.5 large)"
        )
    return base, [f"{found}: {base}"]


def _flux(names: Mapping[str, Shape]) -> tuple[str, list[str]]:
    if any(name.startswith("distilled_guidance_layer.") for name in names):
        raise FormatError("FLUX with distilled_guidance_layer is Chroma; known are FLUX.1 dev and FLUX.1 schnell")
    width = names.get("img_in.weight", (0, 0))[1]
    if width != 64:
        raise FormatError(
            f"FLUX with an input of width {width}; expected 64 (FLUX.1 dev, schnell); 384 is FLUX.1 Fill, "
            "128 are Canny and Depth"
        )
    guided = any(name.startswith("guidance_in.") for name in names)
    base = "flux1-dev" if guided else "flux1-schnell"
    return base, [f"double_blocks {'with' if guided else 'without'} guidance_in: {base}"]


def _verified(base: str, names: Mapping[str, Shape]) -> list[str]:
    """Compare with the listing; a remark on tensors the base does not have."""
    index = bases.known_index(base, "original")
    denoiser = index.components["unet"]
    listed = {name[len(denoiser.prefix) :]: shape for name, shape in denoiser.tensors.items()}
    missing = [name for name in listed if name not in names]
    differing = [name for name in listed if name in names and _plain(names[name]) != _plain(listed[name])]
    if missing or differing:
        first = (
            missing[0] if missing else f"{differing[0]} {list(names[differing[0]])}, not {list(listed[differing[0]])}"
        )
        raise FormatError(
            f"close to {base}, but {len(missing)} of its {len(listed):,} tensors are missing and {len(differing)} have "
            f"another shape (first: {first}); a pruned, distilled or packed model cannot be built as {base}"
        )
    extra = [name for name in names if name not in listed and not name.endswith(QUANTIZATION)]
    remark = f"{len(extra)} tensors {base} does not have, such as {extra[0]}" if extra else ""
    return [f"all {len(listed):,} tensors of the denoiser are there", *([remark] if remark else [])]


def _plain(shape: Shape) -> Shape:
    """1x1 convolutions and linear layers hold the same numbers."""
    return shape[:2] if shape[2:] == (1, 1) else shape


def _turbo(base: str, metadata: Mapping[str, str]) -> tuple[str, list[str]]:
    if base not in _TURBO:
        return base, []
    for key in ("modelspec.architecture", "modelspec.title"):
        if "turbo" in metadata.get(key, "").lower():
            return _TURBO[base], [f"{key} says {metadata[key]!r}: {_TURBO[base]}"]
    return base, [f"{_TURBO[base]} has the same tensors and no metadata names it: {base} is assumed"]


def _prediction(
    variant: Variant, shapes: Mapping[str, Shape], metadata: Mapping[str, str]
) -> tuple[Variant, list[str]]:
    """The variant with what its denoiser predicts, from the surest sign in the file."""
    said = metadata.get("modelspec.prediction_type", "").strip().lower()
    architecture = metadata.get("modelspec.architecture", "").strip().lower()
    prediction: Prediction
    if "v_pred" in shapes:
        prediction, sign = "v_prediction", "the mark v_pred"
    elif said in _PREDICTIONS:
        prediction, sign = _PREDICTIONS[said], f"modelspec.prediction_type {said!r}"
    elif variant.name == "sd2.1" and architecture in _ARCHITECTURES:
        prediction, sign = _ARCHITECTURES[architecture], f"modelspec.architecture {architecture!r}"
    elif variant.name == "sd2.1":
        assumed = "SD 2.1 and 2.1-base have the same tensors and no metadata tells: v_prediction is assumed"
        return variant, [f"{assumed}; name sd2.1-base to override"]
    else:
        return variant, []
    evidence = [f"{sign}: {prediction}"]
    if variant.name == "sd2.1" and prediction == "epsilon":
        return _known("sd2.1-base"), evidence
    zero = prediction == "v_prediction" and "ztsnr" in shapes
    if zero:
        evidence.append("the mark ztsnr: zero terminal SNR")
    return replace(variant, prediction=prediction, zero_terminal_snr=zero), evidence


def _others(variant: Variant, shapes: Mapping[str, Shape]) -> dict[str, str]:
    """folder -> prefix of the autoencoder and the text encoders the file has."""
    known = bases.find(variant.tensors)
    prefixes = [(prefix, "vae") for prefix, component in SINGLE_FILE_PREFIXES if component == "vae"]
    prefixes += [(part.prefix, _ENCODERS[part.component]) for part in known.parts[1:]] if known is not None else []
    found: dict[str, str] = {}
    for prefix, folder in prefixes:
        if folder not in found and any(name.startswith(prefix) for name in shapes):
            found[folder] = prefix
    return found


def _known(name: str) -> Variant:
    found = find_variant(name)
    assert found is not None, name  # a name of our own tables
    return found
