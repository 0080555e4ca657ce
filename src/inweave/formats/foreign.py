"""Files that are not adapters: recognized by their keys and refused with the kind of file and advice.

A key is compared by its *form*, with `#` for every number, so a file of thousands of keys costs about a hundred
comparisons. A kind is recognized by

    mark     one key that never occurs in adapters (`image_proj.`, `lora_controlnet`)
    most     at least half of the keys (`motion_modules`); a few such keys inside an adapter are reported one by one
    plain    the keys of a whole checkpoint, checked only if every key is a plain weight

The table lists the most specific kinds first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from inweave.adapter import Tensor

_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of file: its name, the pattern of its keys, and advice."""

    name: str
    pattern: re.Pattern[str]
    advice: str
    by: Literal["mark", "most"] = "mark"


def _kind(name: str, pattern: str, advice: str, by: Literal["mark", "most"] = "mark") -> Kind:
    return Kind(name, re.compile(pattern), advice, by)


_NODE = "load it with the tool it was made for, alongside the model"
_USE_ORIGINAL = "use the original file it was converted from"

KINDS: tuple[Kind, ...] = (
    _kind("a Control-LoRA", r"^lora_controlnet$", "it is a ControlNet, not an adapter that can be merged; " + _NODE),
    _kind("a ControlNet-LLLite file", r"^lllite_", "it is not an adapter that can be merged; " + _NODE),
    _kind("a PhotoMaker file", r"^(id_encoder|lora_weights)\.",
          "its LoRA part works only with its ID encoder; " + _NODE),
    _kind("a PuLID file", r"^(pulid_ca|pulid_encoder|id_adapter|id_adapter_attn_layers)\.",
          "it injects face features; " + _NODE),
    _kind("an IP-Adapter FaceID file", r"^ip_adapter\.#\.to_\w+_lora\.(down|up)\.weight$|^ip_adapter\.#\.\w*lora",
          "its LoRA part works only with its face projection; the LoRA published alongside it as a separate file can "
          "be used here; " + _NODE),
    _kind("an IP-Adapter or InstantID file",
          r"^(image_proj|ip_adapter|image_proj_model|ip_adapter_proj_model)\.|\.to_[kv]_ip\.|ip_adapter_double_stream_|ip_adapter_single_stream_",
          "it adds attention to image features and changes no weight of the model; " + _NODE),
    _kind("an EasyControl or Stand-In file", r"\b([qkv]|proj|qkv)_loras(\.#)?\.(down|up)(\.weight)?$",
          "its factors apply to the condition image's tokens only, so they cannot be merged; " + _NODE),
    _kind("an AnimateDiff motion LoRA",
          r"(motion_modules?|temporal_transformer|temporal_attentions)[._].*(lora|hada|lokr)",
          "it changes a motion module, which image models do not have; load it with AnimateDiff", "most"),
    _kind("an AnimateDiff motion module", r"(^|[._])(motion_modules?|temporal_attentions)[._]|temporal_transformer",
          "it is a separate network, not an adapter; load it with AnimateDiff", "most"),
    _kind("an adapter converted for nunchaku (SVDQuant)",
          r"\.(qkv_proj|qkv_proj_context|out_proj|out_proj_context|mlp_fc#|mlp_context_fc#|add_qkv_proj|to_qkv|to_added_qkv|net\.#\.proj|fc#)\.(lora_down|lora_up|proj_down|proj_up)$",
          "its factors are packed for one kernel; " + _USE_ORIGINAL, "most"),
    _kind("a model quantized by nunchaku (SVDQuant)",
          r"\.(wscales|wtscale|wcscales|smooth|smooth_orig|smooth_factor|smooth_factor_orig)$",
          "it is a model, and its weights are packed for one kernel; " + _USE_ORIGINAL),
    _kind("a model quantized by torchao", r"\._weight_(qdata|scale|zero_point)$",
          "it is a model, not an adapter; " + _USE_ORIGINAL),
    _kind("an MLX adapter", r"\.lora_[ab]$",
          "its factors are stored transposed and its scale is in MLX's adapter_config.json; fuse it with mlx_lm.fuse, "
          "or save it in PEFT's layout (lora_A = lora_a transposed, lora_B = lora_b transposed)", "most"),
    _kind("a model quantized by MLX", r"\.biases$", "it is a model, not an adapter; " + _USE_ORIGINAL),
    _kind("a hypernetwork", r"^(hypernetwork\.)?#\.#\.linear\.#\.(weight|bias)$",
          "it adds layers before attention and changes no weight; " + _NODE, "most"),
    _kind("a ControlNet",
          r"^(control_model\.|controlnet_(cond_embedding|down_blocks|mid_block|blocks|single_blocks|x_embedder|mode_embedder)|"
          r"input_hint_block\.|control_(layers|noise_refiner|all_x_embedder|blocks)\.)",
          "it is a network that runs alongside the denoiser, not an adapter; " + _NODE),
    _kind("a T2I-Adapter", r"^(adapter\.)?body\.#\.(resnets\.#\.|in_conv\.|block#\.)",
          "it is a network that runs alongside the denoiser; " + _NODE),
    _kind("a FLUX Redux model", r"^redux_(up|down)\.", "it turns an image into prompt features; " + _NODE),
    _kind("a language model quantized by GPTQ or AWQ", r"\.(qweight|qzeros|g_idx)$",
          "it is a model, not an adapter; " + _USE_ORIGINAL),
    _kind("a model quantized by bitsandbytes", r"\.(absmax|quant_map|nested_absmax)$|\.quant_state\.bitsandbytes__",
          "it is a model, not an adapter; " + _USE_ORIGINAL),
    _kind("a prompt-tuning or prefix-tuning adapter", r"(^|\.)prompt_(embeddings|encoder)\b",
          "it adds virtual tokens and changes no weight; load it with PEFT"),
    *(
        _kind(f"a {name} adapter", pattern,
              "its change cannot be computed from the tensors that inweave reads; merge it in PEFT and extract a LoRA")
        for name, pattern in (
            ("PEFT AdaLoRA", r"\.lora_E(\.\w+)?$|\.ranknum(\.\w+)?$"), ("PEFT FourierFT", r"\.fourierft_spectrum"),
            ("PEFT VB-LoRA", r"\.vblora_(logits|vector_bank)"), ("PEFT HRA", r"\.hra_u(\.\w+)?$"),
            ("PEFT Bone or MiSS", r"\.(bone|miss)_block(\.\w+)?$"), ("PEFT C3A", r"\.c3a_kernel"),
            ("PEFT RandLoRA", r"\.randlora_"), ("PEFT SHiRA", r"\.shira_weight"),
            ("PEFT RoAd", r"\.road_(theta|alpha)"), ("PEFT WaveFT", r"\.waveft_spectrum"),
            ("PEFT GraLoRA", r"\.gralora_[AB]"), ("PEFT DeLoRA", r"\.delora_(A|B|lambda)"),
            ("PEFT X-LoRA", r"(^|\.)internal_xlora_classifier\."), ("PEFT Poly", r"\.poly_lora_[AB]"),
        )
    ),
)  # fmt: skip

#: a checkpoint of plain weights, by one of its keys
CHECKPOINTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("a model checkpoint (SDXL)", r"^conditioner\.embedders\.#\."),
        ("a model checkpoint (Stable Diffusion)",
         r"^cond_stage_model\.|^model\.diffusion_model\.(input|middle|output)_blocks?\."),
        ("a model checkpoint (Stable Diffusion 3)", r"joint_blocks\.#\.x_block\."),
        ("a model checkpoint (Wan)", r"(^|\.)(vace_)?blocks\.#\.(self_attn\.(q|norm_q)|modulation$)"),
        ("a model checkpoint (FLUX or HunyuanVideo)", r"(^|\.)double_blocks\.#\.(img_attn|img_attn_qkv|img_mod)"),
        ("a model checkpoint (UNet)", r"^(unet\.)?down_blocks\.#\.(resnets|attentions)\."),
        ("a model checkpoint (VAE)",
         r"^(first_stage_model\.|vae\.)?"
         r"((en|de)coder\.(conv_in|conv#|mid|up_blocks|down_blocks|downsamples|layers\.#\.(conv|weight))\b"
         r"|(post_)?quant_conv\.|(taesd_)?decoder\.#\.)"),
        ("a model checkpoint (diffusion transformer)",
         r"(^|\.)((single_)?transformer_blocks|joint_transformer_blocks|noise_refiner|visual_transformer_blocks)\.#\."),
        ("a model checkpoint (T5 text encoder)", r"(^|\.)encoder\.block\.#\.layer\.#\.SelfAttention"),
        ("a model checkpoint (CLIP vision encoder)", r"^(vision_model|visual)\.(encoder|transformer)\."),
        ("a model checkpoint (CLIP text encoder)",
         r"(^|\.)text_model\.(encoder|embeddings)\.|^transformer\.resblocks\.#\."),
        ("a model checkpoint (upscaler)",
         r"(^|\.)(RDB#\.conv#|rdb#\.conv#|residual_group\.blocks)"
         r"|^(conv_first|conv_up#|upconv#|upsample\.#)\.|^(params|params_ema)\."),
        ("a model checkpoint (language model)",
         r"(^|\.)(layers\.#\.(self_attn\.q_proj|mlp\.gate_proj|attention\.wq)|h\.#\.attn\.c_attn)\."),
    )
)  # fmt: skip

#: keys of a regular adapter, even if the module's name resembles another kind of file
_FACTOR = re.compile(r"\.(lora_(A|B|down|up|mid)(\.\w+)*|alpha)$")
_TOKENS = re.compile(
    r"^(emb_params|clip_[lgh]|t5(xxl)?|text_encoders_#|string_to_(param|token)(\.\*)?|<[^<>]+>|qwen\w*|llama\w*)$"
)


def foreign_kind(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str | None:
    """Return the kind of a file that is not an adapter, with advice, or None if it may be one."""
    forms = Counter(_NUMBER.sub("#", key) for key in tensors)
    if all(_TOKENS.match(form) for form in forms) or _is_embedding(tensors):
        return (
            "a textual-inversion embedding, not an adapter: it adds words to the text encoder's vocabulary and changes "
            "no weight; put it where your program looks for embeddings"
        )
    if any(name.startswith("mflux") for name in metadata):
        return (
            "an MLX adapter (saved by mflux): its factors are stored transposed; "
            "save it from mflux in diffusers' layout"
        )
    for kind in KINDS:
        hits = {
            form: count
            for form, count in forms.items()
            if kind.pattern.search(form) and not (kind.by == "mark" and _FACTOR.search(form))
        }
        if hits and (kind.by == "mark" or sum(hits.values()) * 2 >= len(tensors)):
            example = next(key for key in tensors if _NUMBER.sub("#", key) in hits)
            return f"{kind.name} (it holds `{example[:120]}`): {kind.advice}"
    return None


def checkpoint_kind(keys: Iterable[str]) -> str:
    """Return the kind of model that a file of plain weights holds."""
    forms = {_NUMBER.sub("#", key) for key in keys}
    return next(
        (name for name, pattern in CHECKPOINTS if any(pattern.search(form) for form in forms)), "a model checkpoint"
    )


def _is_embedding(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the file holds a learned word: a few vectors of a text encoder's width, named without a dot."""
    return 0 < len(tensors) <= 4 and all(
        _WORD.match(key) and 1 <= len(tensor.shape) <= 2 and tensor.shape[-1] in _WIDTHS
        and (len(tensor.shape) == 1 or tensor.shape[0] <= 256)
        for key, tensor in tensors.items()
    )  # fmt: skip


_WORD = re.compile(r"^(?!w_[ab]_\d|lora)[^.:]+$")
_WIDTHS = (768, 1024, 1280, 2048, 2304, 2560, 3584, 4096, 5120)
