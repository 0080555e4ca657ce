"""The programs that find the modules of a written file, by the rules of their own loaders.

    ComfyUI      lora_unet_<name> and diffusion_model.<name>, where name is that of its own model class: it renames some
                 models (the tables `<name>-comfy`), and has no class for others (`in_comfyui` in the catalog)
    diffusers    its own names, and those of the original model for the few families whose loaders convert them
    A1111        kohya's names of UNets and SD 3; sd-scripts and musubi-tuner: of the families that they train
    OneTrainer   its own names of the models that it trains, which ComfyUI knows of UNets, SD 3 and FLUX.1

diffusers 0.42 was tried with a file of each family (`tests/unit/exchange/test_readers.py`), ComfyUI's rules are
those of comfy/lora.py at 17358c8f and of the models that comfy/supported_models.py lists at 01f03bbd.
"""

from __future__ import annotations

from collections.abc import Collection

from inweave.formats.dialects import dialect_named
from inweave.targets.bases import same_names
from inweave.targets.index import Component, ModelIndex
from inweave.targets.tables import SPELLINGS

#: dialect -> the families whose names diffusers converts; Qwen-Image has no table, so its listings stand for it
DIFFUSERS_READS = {
    "comfy": ("flux", "wan", "minimax-h3", "ideogram4", "qwen-image", "qwen-image-layered"),
    "kohya": ("unet", "flux", "flux2", "minimax-h3", "qwen-image", "qwen-image-layered"),
}
_TRAINED_BY = {
    "A1111 and sd-scripts": ("unet", "sd3"),
    "sd-scripts": ("flux", "lumina2", "hunyuan-image", "anima"),
    "musubi-tuner": ("wan", "hunyuan-video", "hunyuan-video-1.5", "flux2", "z-image", "krea2", "qwen-image"),
}
#: families whose modules ComfyUI finds under lora_unet_ and lora_transformer_ with diffusers' names
_ONETRAINER_IN_COMFYUI = ("unet", "sd3", "flux")
#: the bases that OneTrainer trains: modules/util/enum/ModelType.py at 23df383
_BY_ONETRAINER = (
    "sd1.5", "sd1.5-inpaint", "sd2.1", "sd2-inpaint", "sdxl", "sdxl-inpaint", "sd3-medium", "sd3.5-medium",
    "sd3.5-large", "flux1-dev", "flux1-fill-dev", "chroma1-hd", "flux2-dev", "flux2-klein-4b", "flux2-klein-9b",
    "stable-cascade-prior-1b", "stable-cascade-prior-3.6b", "pixart-alpha-512", "pixart-alpha-1024",
    "pixart-sigma-1024", "sana-0.6b", "sana-1.6b", "sana-1.5-1.6b", "sana-1.5-4.8b", "hunyuanvideo", "hidream-i1",
    "qwen-image", "anima", "krea2", "z-image-turbo", "ernie-image", "ideogram4",
)  # fmt: skip


def original_names_refusal(dialect: str, index: ModelIndex) -> str:
    """Return why a dialect that spells the original names cannot be written for a model, or nothing.

    A table gives the original names, or a listing says that they are diffusers' own. An index without a base or a
    source has the caller's own names: kohya's form of them is read here again, and by no other program.
    """
    if dialect == "kohya" and not (index.base or index.source):
        return ""
    denoiser, naming = index.denoiser, dialect_named(dialect).naming
    if naming == "diffusers" or denoiser is None or denoiser.table.name != "own":
        return ""
    if (known := same_names(index)) is not None and known.parts[0].one_naming:
        return ""
    what = index.base or index.source or "this model"
    return (
        f"{dialect} spells modules as the original model does, and inweave has no table of the original names of "
        f"{what}; write this one as diffusers or peft"
    )


def reader_notes(dialect: str, index: ModelIndex, modules: Collection[str]) -> list[str]:
    """Return notes about programs that do not find ``modules``, the denoiser's names in a file in ``dialect``."""
    denoiser = index.denoiser
    if denoiser is None or not modules:
        return []
    if dialect == "onetrainer":
        return [_readers_of_onetrainer(denoiser, index)]
    if dialect not in DIFFUSERS_READS:
        return []
    family, there, known = _family(denoiser, index), _comfy_names(denoiser), same_names(index)
    notes = []
    if known is not None and not known.in_comfyui:
        notes.append(f"ComfyUI has no model class of {known.name}: it does not use this file")
    elif lost := [module for module in modules if _flat(module) not in there]:
        notes.append(
            f"ComfyUI skips {len(lost)} of {len(modules)} modules, which have other names there ({lost[0]}): "
            "for it write comfy"
        )
    elif dialect == "comfy":
        forge = " and Forge" if family in ("unet", "flux") else ""
        notes.append(f"these are the names of ComfyUI{forge}")
    if known is not None and not known.in_diffusers:
        notes.append(f"diffusers has no model class of {known.name}")
    elif family not in DIFFUSERS_READS[dialect]:
        notes.append("diffusers does not read these names of this model: for it write diffusers")
    trainers = next((names for names, families in _TRAINED_BY.items() if family in families), "")
    if dialect == "comfy" and trainers:
        notes.append(f"{trainers} cannot read these names: for kohya's programs write kohya")
    return notes


def _readers_of_onetrainer(denoiser: Component, index: ModelIndex) -> str:
    known = same_names(index)
    programs = ["OneTrainer"] if known is None or known.name in _BY_ONETRAINER else []
    if _family(denoiser, index) in _ONETRAINER_IN_COMFYUI and (known is None or known.in_comfyui):
        programs.append("ComfyUI")
    if programs == ["OneTrainer", "ComfyUI"]:
        return "these names are read by OneTrainer and ComfyUI; for A1111 and sd-scripts write kohya"
    if programs:
        return f"these names of this model are read by {programs[0]} alone; for other programs write diffusers or comfy"
    what = known.name if known is not None else "this model"
    return f"neither OneTrainer nor ComfyUI reads these names of {what}; write diffusers, or comfy where it has it"


def _family(component: Component, index: ModelIndex) -> str:
    name = component.table.name.removesuffix("-comfy")
    known = same_names(index)
    return known.parts[0].listing if name == "own" and known else name


def _comfy_names(component: Component) -> Collection[str]:
    """Return the flat names under which ComfyUI knows the modules of a denoiser."""
    name = f"{component.table.name.removesuffix('-comfy')}-comfy"
    spelled = component.spelled_by(name) if name in SPELLINGS.get(component.table.name, ()) else component
    names = {_flat(tensor.rpartition(".")[0]) for tensor in spelled.tiles}
    if component.table.name == "unet":
        names |= {_flat(part.rpartition(".")[0]) for part in component.parts}
    return names


def _flat(name: str) -> str:
    return name.replace(".", "_")
