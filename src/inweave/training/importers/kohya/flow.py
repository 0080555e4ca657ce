"""What kohya's scripts for transformers do in another way than those for UNets: which settings they read, and their times.

sd-scripts     flux_train_network.py, sd3_train_network.py
musubi-tuner   qwen_image_train_network.py, zimage_train_network.py: the text encoders are not trained, and the dataset
               file alone says what is in it

FLUX.1         sigma: a place in the schedule, where 0 is pure noise, so that logit_mean changes its sign
               weighting_scheme weights the loss with model_prediction_type = sigma_scaled only
SD 3           a noise level, shifted by training_shift; images are compared, and sigma_sqrt undoes that
musubi         as FLUX.1, but weighting_scheme weights the loss however times are sampled
               logsnr: sigmoid(-(mean + std n) / 2)
min_timestep, max_timestep     SD 3 and musubi: times are scaled into this range; FLUX.1 ignores it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.importers.targets import FLOW
from inweave.training.importers.translate import Translation
from inweave.training.importers.values import is_off, normalize_name, parse_number

#: families whose scripts are musubi-tuner's
MUSUBI: Final = frozenset({"qwen_image", "z_image"})

_UNET_ONLY = (
    "min_snr_gamma", "noise_offset", "multires_noise_iterations", "multires_noise_discount", "debiased_estimation_loss",
    "adaptive_noise_scale", "noise_offset_random_strength", "scale_v_pred_loss_like_noise_pred", "v_pred_like_loss",
    "zero_terminal_snr", "v_parameterization", "max_token_length", "weighted_captions",
)  # fmt: skip
_FLOW_ONLY = (
    "timestep_sampling", "weighting_scheme", "sigmoid_scale", "logit_mean", "logit_std", "mode_scale", "guidance_scale",
    "model_prediction_type", "discrete_flow_shift", "training_shift", "apply_t5_attn_mask", "t5xxl_max_token_length",
    "blocks_to_swap", "split_mode", "t5xxl", "ae", "clip_l", "clip_g",
)  # fmt: skip
#: settings of sd-scripts that musubi-tuner does not have
_NOT_IN_MUSUBI = (
    "unet_lr", "text_encoder_lr", "network_train_unet_only", "network_train_text_encoder_only", "save_precision", "loss_type",
    "huber_c", "huber_schedule", "ip_noise_gamma", "train_batch_size", "resolution", "enable_bucket", "min_bucket_reso",
    "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale", "caption_extension", "shuffle_caption", "keep_tokens",
    "caption_dropout_rate", "caption_tag_dropout_rate", "flip_aug", "random_crop", "color_aug", "train_data_dir", "reg_data_dir",
    "prior_loss_weight", "clip_skip", "cache_latents", "cache_latents_to_disk", "cache_text_encoder_outputs",
    "cache_text_encoder_outputs_to_disk", "guidance_scale", "model_prediction_type", "training_shift", "masked_loss",
)  # fmt: skip


def ignored_settings(family: str) -> tuple[str, ...]:
    """The settings that the scripts of a family do not read."""
    if family in MUSUBI:
        return (*_UNET_ONLY, *_NOT_IN_MUSUBI)
    others = {
        "flux": ("min_timestep", "max_timestep", "training_shift"),
        "sd3": (
            "ip_noise_gamma",
            "discrete_flow_shift",
            "timestep_sampling",
            "guidance_scale",
            "model_prediction_type",
        ),
    }
    return (*_UNET_ONLY, *others[family]) if family in FLOW else _FLOW_ONLY


def read_times(out: Translation, settings: Mapping[str, Any]) -> None:
    """Timesteps of a flow: how they are sampled, by how much they are shifted, and how much each counts."""
    if out.family not in FLOW:
        out.fields["timestep_sampling"] = "uniform"
        return
    fields = _sampling(out.family, settings)
    for name in ("logit_mean", "logit_std", "timestep_shift", "timestep_sampling"):
        out.fields.pop(name, None)
    if fields:
        out.fields |= fields
    else:
        sampling = "sigma" if out.family == "sd3" else settings.get("timestep_sampling")
        value = f"{for_message(sampling)}, {for_message(settings.get('weighting_scheme'))}"
        shift = _shift(out.family, settings)
        out.refuse("timestep_sampling", f"{value} with a shift of {shift:g} has no equivalent", "timestep_sampling")
    ranged = [name for name in ("min_timestep", "max_timestep") if out.fields.get(name) is not None]
    if ranged and out.family in MUSUBI and normalize_name(settings.get("timestep_sampling")) == "sigma":
        out.refuse(ranged[0], "with timestep_sampling = sigma the range counts from pure noise, before the shift")


def _shift(family: str, settings: Mapping[str, Any]) -> float:
    return parse_number(settings.get("training_shift" if family == "sd3" else "discrete_flow_shift", 1.0))


def _sampling(family: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings of the times; none where they cannot be expressed."""
    kind, scheme = normalize_name(settings.get("timestep_sampling")), normalize_name(settings.get("weighting_scheme"))
    std, mean = parse_number(settings.get("logit_std", 1.0)), parse_number(settings.get("logit_mean", 0.0))
    scale, shift = parse_number(settings.get("sigmoid_scale", 1.0)), _shift(family, settings)
    factor = None if shift == 1 else shift
    weighted = {"flux": (), "sd3": ("cosmap",)}.get(family, ("cosmap", "sigmasqrt"))
    if scheme in weighted:
        return {}
    extra: dict[str, Any] = {}
    if family == "sd3":
        kind, extra = "level", {"sigma_weighting": 0.0 if scheme == "sigmasqrt" else 2.0}
    if kind in ("sigma", "level") and scheme == "logitnormal":
        mean = (-mean or 0.0) if kind == "sigma" else mean
        name = "shift" if factor and not mean else "logit_normal"
        return {"timestep_sampling": name, "logit_mean": mean, "logit_std": std, "timestep_shift": factor, **extra}
    if kind in ("sigma", "level") and scheme in ("none", "uniform", "sigmasqrt", "cosmap"):
        return {"timestep_sampling": "uniform", "timestep_shift": factor, **extra}
    if kind == "logsnr" and family in MUSUBI:
        return {"timestep_sampling": "logit_normal", "logit_mean": -mean / 2 or 0.0, "logit_std": std / 2}
    if kind == "shift":
        return {"timestep_sampling": "shift", "logit_std": scale, "timestep_shift": shift}
    if kind == {"qwen_image": "qwenshift", "flux": "fluxshift"}.get(family):
        return {"timestep_sampling": "shift", "logit_std": scale, "timestep_shift": None}
    if kind == "sigmoid":
        return {"timestep_sampling": "sigmoid", "logit_std": scale}
    return {"timestep_sampling": "uniform"} if kind == "uniform" else {}


def ensure_musubi_arguments(out: Translation, settings: Mapping[str, Any]) -> None:
    """Refuse what musubi-tuner does to times and losses beside their distribution."""
    for name, why in (
        ("preserve_distribution_shape", "times outside of the range are scaled into it, not sampled again"),
        ("num_timestep_buckets", "times are sampled independently, not by strata"),
        ("use_mask_loss", "its masks are weights from a folder of their own"),
    ):
        value = settings.get(name)
        single = name == "num_timestep_buckets" and not is_off(value) and parse_number(value) <= 1
        if not is_off(value) and not single:
            out.refuse(name, f"{for_message(value)}: {why}")
