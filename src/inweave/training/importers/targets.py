r"""Which modules other trainers adapt, as regular expressions for whole module names in diffusers' spelling.

    UNet           kohya's LoRA: everything inside of Transformer2DModel, with proj_in and proj_out
                   LoCon:        and ResnetBlock2D, Downsample2D, Upsample2D
                   LyCORIS full: and, of SD 1 and 2, conv_in, conv_out and the time embedding
    transformers   kohya, ai-toolkit: every linear layer inside of the blocks, modulation included
    text encoders  attention and MLP of every layer

One expression is for all networks of a run: an entry of `targets` that matches nothing is an error.
"""

from __future__ import annotations

from typing import Final

FLOW: Final = frozenset({"sd3", "flux", "flux2", "qwen_image", "z_image"})

ENCODER: Final = r".*layers\.\d+\.(self_attn|mlp)\..+"
_TRANSFORMER: Final = r".*attentions\.\d+\..+"
_RESIDUAL: Final = r".*(resnets|downsamplers|upsamplers)\.\d+\..+"
BLOCKS: Final = r"((single_)?transformer_blocks|layers|noise_refiner|context_refiner)\.\d+\..+"
_ENDS: Final = r"conv_in|conv_out|time_embedding\.linear_[12]"
_TIME: Final = r"time_embedding\.linear_[12]"

#: preset of LyCORIS -> (its convolutions are adapted, the text encoders too)
LYCORIS_PRESETS: Final = {
    "full": (True, True), "fulllin": (False, True), "attnmlp": (False, True), "attnonly": (False, True),
    "unetonly": (True, False), "unettransformeronly": (False, False), "unetconvblockonly": (True, False),
}  # fmt: skip


def _joined(*parts: str) -> list[str]:
    return ["|".join(part for part in parts if part)]


def kohya_targets(family: str, convolutions: bool, modulation: bool = False) -> list[str]:
    """Return the modules of networks.lora, lora_flux and lora_sd3; of Qwen-Image the ``modulation`` on request."""
    if family in FLOW:
        blocks = {
            "qwen_image": r"transformer_blocks\.\d+\." + ("" if modulation else "(?!img_mod|txt_mod)") + ".+",
            "z_image": r"layers\.\d+\.(?!adaLN).+",
        }
        return _joined(blocks.get(family, BLOCKS), ENCODER)
    return _joined(_TRANSFORMER, _RESIDUAL if convolutions else "", ENCODER)


def lycoris_targets(family: str, preset: str) -> list[str]:
    """Return the modules of a preset of LyCORIS; the names of a UNet's ends match nothing in kohya's UNet of SDXL."""
    encoder = ENCODER if LYCORIS_PRESETS[preset][1] else ""
    if family in FLOW:
        return _joined(r".*attn\..+" if preset == "attnonly" else BLOCKS, encoder)
    ends = _ENDS if family != "sdxl" else ""
    if preset == "attnonly":
        return _joined(r".*attn[12]\..+", r".*self_attn\..+")
    if preset == "fulllin":
        linear = r".*resnets\.\d+\.(time_emb_proj|conv_shortcut)"
        return _joined(_TRANSFORMER, linear, _TIME if ends else "", encoder)
    if preset == "unetconvblockonly":
        return _joined(_RESIDUAL, "conv_in|conv_out" if ends else "")
    if LYCORIS_PRESETS[preset][0]:
        return _joined(_TRANSFORMER, _RESIDUAL, ends, encoder)
    return _joined(_TRANSFORMER, encoder)


def toolkit_targets(family: str, convolutions: bool) -> list[str]:
    """Return the modules of ai-toolkit: those of kohya in a UNet, everything in a transformer's blocks."""
    blocks = r"layers\.\d+\..+" if family == "z_image" else BLOCKS  # ai-toolkit chooses by that word
    return _joined(blocks, ENCODER) if family in FLOW else kohya_targets(family, convolutions)


def everything() -> list[str]:
    """Return a pattern for every linear layer and convolution, as OneTrainer does without a filter."""
    return [".*"]


def filtered(patterns: list[str], encoders: bool) -> list[str]:
    """Return the denoiser's modules that match a pattern, and everything of the text encoders."""
    return _joined(*patterns, r"(text_model\.|encoder\.).*|text_projection" if encoders else "")
