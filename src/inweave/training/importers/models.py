"""The models that other trainers name, and which of them can be trained here.

    name of a model, script or network module ──► our family, or the reason why the file is refused

A file for a model that cannot be trained is refused for that reason alone, whatever else it asks for.
"""

from __future__ import annotations

import re
from typing import Any, Final

from inweave.checked import for_message
from inweave.errors import ConfigError

KNOWN: Final = "SD 1.5, SD 2.1, SDXL, SD 3 and 3.5, FLUX.1, FLUX.2, Qwen-Image and Z-Image"

#: OneTrainer's model types
ONE_TRAINER: Final = {
    "STABLE_DIFFUSION_15": "sd", "STABLE_DIFFUSION_20_BASE": "sd", "STABLE_DIFFUSION_20": "sd",
    "STABLE_DIFFUSION_21": "sd", "STABLE_DIFFUSION_21_BASE": "sd",
    "STABLE_DIFFUSION_XL_10_BASE": "sdxl", "STABLE_DIFFUSION_3": "sd3",
    "STABLE_DIFFUSION_35": "sd3", "FLUX_DEV_1": "flux", "FLUX_2": "flux2", "QWEN": "qwen_image", "Z_IMAGE": "z_image",
}  # fmt: skip
#: ai-toolkit's architectures, and the switches that came before them
AI_TOOLKIT: Final = {
    "sd1": "sd", "sd15": "sd", "sd2": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "qwenimage": "qwen_image",
    "flux2": "flux2", "flux2klein4b": "flux2", "flux2klein9b": "flux2",
    "zimage": "z_image", "zimageturbo": "z_image", "zimagedeturbo": "z_image",
    "fluxkontext": "flux", "qwenimageeditplus": "qwen_image",
}  # fmt: skip
AI_TOOLKIT_SWITCHES: Final = {
    "is_v2": "sd2", "is_xl": "sdxl", "is_v3": "sd3", "is_flux": "flux", "is_pixart": "pixart",
    "is_pixart_sigma": "pixart_sigma", "is_auraflow": "auraflow", "is_lumina2": "lumina2", "is_ssd": "ssd",
    "is_vega": "vega",
}  # fmt: skip
#: SimpleTuner's families
SIMPLE_TUNER: Final = {
    "sd1x": "sd", "sd2x": "sd", "legacy": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "flux2": "flux2",
    "qwenimage": "qwen_image", "zimage": "z_image", "zimageturbo": "z_image",
}  # fmt: skip
#: diffusion-pipe's model types
DIFFUSION_PIPE: Final = {
    "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "flux2": "flux2", "qwen_image": "qwen_image", "z_image": "z_image",
}  # fmt: skip
#: network modules and scripts of kohya's repositories, without their common prefix
KOHYA: Final = {
    "": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "flux2": "flux2", "qwenimage": "qwen_image",
    "zimage": "z_image", "sd": "sd",
}  # fmt: skip
#: full names of models whose short name says little
_NAMES: Final = {
    "lumina": "Lumina Image 2", "lumina2": "Lumina Image 2", "hunyuanimage": "HunyuanImage", "anima": "Anima",
    "wan": "Wan", "wan21": "Wan 2.1",
    "hv": "HunyuanVideo", "fpack": "FramePack", "framepack": "FramePack",
    "flux2img2img": "FLUX.2 with reference images", "flux2kleinimg2img": "FLUX.2 klein with reference images",
    "fluxkontext": "FLUX.1 Kontext", "chroma": "Chroma", "hunyuan": "HunyuanVideo", "kandinsky5": "Kandinsky 5",
    "qwenimageedit": "Qwen-Image-Edit of August 2025",
    "hunyuanvideo": "HunyuanVideo", "hunyuanvideo15": "HunyuanVideo 1.5", "ltxvideo": "LTX-Video", "ltx2": "LTX 2",
    "cosmos": "Cosmos", "cosmospredict2": "Cosmos-Predict2", "hidream": "HiDream", "omnigen2": "OmniGen2",
    "auraflow": "AuraFlow", "ernieimage": "ERNIE-Image", "ideogram4": "Ideogram 4", "krea2": "Krea 2",
    "minimaxh3": "MiniMax H3",
}  # fmt: skip


def ensure_trainable(family: str | None, name: Any, where: str) -> str:
    """Return the family, or raise an error that names the model."""
    if family is None:
        text = for_message(name)
        known_as = _NAMES.get("".join(letter for letter in str(name).lower() if letter.isalnum()))
        label = f"{text} ({known_as})" if known_as else text
        raise ConfigError(f"{where}: {label} is a model that cannot be trained here; {KNOWN} can")
    return family


def refuse_method(where: str, method: str) -> ConfigError:
    """Return the error for a file that trains something other than an adapter."""
    return ConfigError(f"{where}: {method}; only LoRA and its relatives (LoCon, LoHa, LoKr, DoRA) are trained here")


def refuse_script(script: str) -> ConfigError:
    """Return the error for a command with an unknown training script."""
    return ConfigError(
        f"script: {for_message(script)} is not one whose settings are known here; those of kohya (train_network.py and "
        "relatives, with network_module) and of diffusers (train_text_to_image_lora*.py, train_dreambooth_lora*.py) are"
    )


def ensure_plain_base(name: Any, where: str, *, editing: bool = False) -> None:
    """Refuse inpainting, depth and editing models by the names that their publishers give them.

    With ``editing`` Kontext and Qwen-Image-Edit are accepted, whose references the file names; the first version of the
    latter is not.
    """
    text = str(name).lower().rstrip("/\\")
    for word, kind in (("inpaint", "an inpainting model"), ("kontext", "FLUX.1 Kontext, an editing model"),
                       ("-fill", "an inpainting model"), ("image-edit", "an editing model"), ("chroma", "Chroma"),
                       ("refiner", "the refiner of SDXL"),
                       ("depth", "a depth model")):  # fmt: skip
        if editing and (word == "kontext" or (word == "image-edit" and not text.endswith("qwen-image-edit"))):
            continue
        if word in re.split(r"[/\\]", text)[-1].replace("image_edit", "image-edit") and not (
            word == "depth" and "dev" in text
        ):
            raise ConfigError(f"{where}: {for_message(name)} is {kind}, which cannot be trained here; {KNOWN} can")
