"""kohya's scripts for transformers: the settings that they ignore, and how they sample timesteps.

sd-scripts     flux_train_network.py, sd3_train_network.py
musubi-tuner   qwen_image_, zimage_ and flux_2_train_network.py: the text encoders are not trained, and the dataset
               file alone says what is in it

FLUX.1         sigma: a place in the schedule, where 0 is pure noise, so that logit_mean changes its sign
               weighting_scheme weights the loss with model_prediction_type = sigma_scaled only
SD 3           a noise level, shifted by training_shift; images are compared, and sigma_sqrt undoes that
musubi         as FLUX.1, but weighting_scheme weights the loss however times are sampled
               logsnr: sigmoid(-(mean + std n) / 2)
min_timestep, max_timestep     SD 3 and musubi: times are scaled into this range; FLUX.1 ignores it
"""

from __future__ import annotations

from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config.translate import Translation
from inweave.training.config.values import parse_number
from inweave.training.importers.targets import FLOW

#: families whose scripts are musubi-tuner's
MUSUBI: Final = frozenset({"flux2", "qwen_image", "z_image"})

_UNET_ONLY = """
    min_snr_gamma noise_offset multires_noise_iterations multires_noise_discount debiased_estimation_loss
    adaptive_noise_scale noise_offset_random_strength scale_v_pred_loss_like_noise_pred v_pred_like_loss
    zero_terminal_snr v_parameterization max_token_length weighted_captions
"""
_TRANSFORMER_ONLY = """
    timestep_sampling weighting_scheme sigmoid_scale logit_mean logit_std mode_scale guidance_scale
    model_prediction_type discrete_flow_shift training_shift apply_t5_attn_mask t5xxl_max_token_length blocks_to_swap
    split_mode t5xxl ae clip_l clip_g
"""
#: settings of sd-scripts that musubi-tuner does not have
_NOT_IN_MUSUBI = """
    unet_lr text_encoder_lr network_train_unet_only network_train_text_encoder_only save_precision loss_type huber_c
    huber_schedule ip_noise_gamma train_batch_size resolution enable_bucket min_bucket_reso max_bucket_reso
    bucket_reso_steps bucket_no_upscale caption_extension shuffle_caption keep_tokens caption_dropout_rate
    caption_tag_dropout_rate flip_aug random_crop color_aug train_data_dir reg_data_dir prior_loss_weight clip_skip
    cache_latents cache_latents_to_disk cache_text_encoder_outputs cache_text_encoder_outputs_to_disk guidance_scale
    model_prediction_type training_shift masked_loss
"""
_NOT_IN_SD3 = "ip_noise_gamma discrete_flow_shift timestep_sampling guidance_scale model_prediction_type"
_IGNORED: Final = {
    "flux": f"{_UNET_ONLY} min_timestep max_timestep training_shift", "sd3": f"{_UNET_ONLY} {_NOT_IN_SD3}",
    **dict.fromkeys(MUSUBI, f"{_UNET_ONLY} {_NOT_IN_MUSUBI}"),
}  # fmt: skip


def ignored_settings(family: str) -> frozenset[str]:
    """Return the settings that the scripts of a family do not read."""
    return frozenset(_IGNORED.get(family, _TRANSFORMER_ONLY).split())


def read_times(out: Translation) -> None:
    """Set how timesteps of a flow are sampled and shifted, and how much each counts."""
    if out.family not in FLOW:
        out.fields["timestep_sampling"] = "uniform"
        return
    fields = _sampling(out)
    for name in ("logit_mean", "logit_std", "timestep_shift", "timestep_sampling"):
        out.fields.pop(name, None)
    if fields:
        out.fields |= fields
    else:
        sampling = "sigma" if out.family == "sd3" else out.get("timestep_sampling")
        value = f"{for_message(sampling)}, {for_message(out.get('weighting_scheme'))}"
        shift = _shift(out)
        out.refuse("timestep_sampling", f"{value} with a shift of {shift:g} has no equivalent", "timestep_sampling")
    ranged = [name for name in ("min_timestep", "max_timestep") if out.fields.get(name) is not None]
    if ranged and out.family in MUSUBI and out.word("timestep_sampling") == "sigma":
        out.refuse(ranged[0], "with timestep_sampling = sigma the range counts from pure noise, before the shift")


def _shift(out: Translation) -> float:
    return parse_number(out.get("training_shift" if out.family == "sd3" else "discrete_flow_shift", 1.0))


def _sampling(out: Translation) -> dict[str, Any]:
    """Return our settings of the times; none if they cannot be expressed."""
    family, kind, scheme = out.family, out.word("timestep_sampling"), out.word("weighting_scheme")
    std, mean = parse_number(out.get("logit_std", 1.0)), parse_number(out.get("logit_mean", 0.0))
    scale, shift = parse_number(out.get("sigmoid_scale", 1.0)), _shift(out)
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
    if kind == {"qwen_image": "qwenshift", "flux": "fluxshift", "flux2": "flux2shift"}.get(family):
        return {"timestep_sampling": "shift", "logit_std": scale, "timestep_shift": None}
    if kind == "sigmoid":
        return {"timestep_sampling": "sigmoid", "logit_std": scale}
    return {"timestep_sampling": "uniform"} if kind == "uniform" else {}


def refuse_musubi_arguments(out: Translation) -> None:
    """Refuse musubi-tuner's options for timesteps and masks that have no equivalent."""
    for name, why in (
        ("preserve_distribution_shape", "times outside of the range are scaled into it, not sampled again"),
        ("num_timestep_buckets", "times are sampled independently, not by strata"),
        ("use_mask_loss", "its masks are weights from a folder of their own"),
    ):
        single = name == "num_timestep_buckets" and out.is_on(name) and parse_number(out.get(name)) <= 1
        if out.is_on(name) and not single:
            out.refuse_value(name, why)
