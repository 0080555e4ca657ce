"""kohya's settings in an import: the names of `config.aliases`, and what its scripts do beyond them."""

from __future__ import annotations

from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config import row
from inweave.training.config.aliases import ALIASES, LOSSES, put_encoder_rate, rates_of_encoders
from inweave.training.config.translate import SettingRow, Translation
from inweave.training.config.values import is_off, normalize_name, parse_int, parse_number, parse_scalar
from inweave.training.importers.optimizers import optimizer, optimizer_args


def _text_encoder_lr(out: Translation, name: str, value: Any) -> None:
    """Set the rate of the text encoders, or of each where they differ; FLUX.1's only CLIP is the first."""
    listed = rates_of_encoders(out, value)
    rate = parse_scalar(listed[0]) if listed else None
    rates = [parse_number(each) for each in listed]
    two = out.family in ("sdxl", "sd3")
    if len(set(rates[:2])) > 1 and two and all(rates[:2]):
        out.add_rules(name, [{"pattern": r"^te2\.", "learning_rate": rates[1]}])
    elif two and any(rates[:2]) and not all(rates[:2]):
        out.add_rules(name, [{"pattern": r"^te2\." if rates[0] else r"^te1\.", "skip": True}])
        rate = max(rates[:2])
    elif len({str(each) for each in listed}) > 1 and out.family != "flux":
        out.unsupported(f"{name}.1", "all text encoders share one learning rate, the first")
    put_encoder_rate(out, name, rate, bool(parse_number(rate) if rates else rate))


def _loss(out: Translation, name: str, value: Any) -> None:
    if ours := LOSSES.get(normalize_name(value)):
        out.put(name, "loss", ours)
    else:
        out.refuse(name, f"{for_message(value)} is not supported")


def _resume(out: Translation, name: str, value: Any) -> None:
    out.put(name, "resume", "never")
    if not is_off(value):
        out.unsupported(name, "a training state of another trainer cannot be resumed; start_from takes its adapter")


def _clip_skip(out: Translation, name: str, value: Any) -> None:
    """Set the layer: kohya's 1 is the model's own; its scripts for SDXL and transformers ignore the setting."""
    if out.family != "sd":
        out.put(name, "clip_skip", None)
        out.note(name, "is ignored for this model")
    else:
        out.put(name, "clip_skip", parse_int(value) if parse_int(value) > 1 else None)


def _bucket_step(out: Translation, name: str, value: Any) -> None:
    """Set the step of buckets; kohya takes any, and its autoencoder cuts sides to multiples of 8."""
    step = parse_int(value)
    if is_off(out.get("enable_bucket")) and not out.get("dataset_config"):
        out.note(name, "there are no buckets")
    elif step < 8 or step % 8:
        out.refuse(name, f"{for_message(value)}: sides are multiples of 8 here, as those of latents are", "bucket_step")
    else:
        out.put(name, "bucket_step", step)


def _timestep_limit(ours: str, whole: int) -> SettingRow:
    def read(out: Translation, name: str, value: Any) -> None:
        if parse_int(value) in (0, whole):
            out.unset.append(name)
        else:
            out.put(name, ours, parse_int(value))

    return row.custom(read)


def _huber(ours: str) -> SettingRow:
    return row.to(
        ours,
        parse_scalar,
        when=lambda out: normalize_name(out.get("loss_type", "l2")) in ("huber", "smoothl1"),
        otherwise="only used by loss_type = huber and smooth_l1",
    )


def _multires_discount(out: Translation, name: str, value: Any) -> None:
    if not out.is_on("multires_noise_iterations"):
        out.note(name, "only used with multires_noise_iterations")
    else:
        row.to("multires_noise_discount", parse_number, off=True).read(out, name, value)


KOHYA: Final[dict[str, SettingRow]] = {
    **ALIASES,
    "text_encoder_lr": row.custom(_text_encoder_lr, "train_text_encoders"),
    "optimizer_type": row.custom(optimizer, "optimizer"), "optimizer_args": row.custom(optimizer_args),
    "bucket_reso_steps": row.custom(_bucket_step, "bucket_step"),
    "loss_type": row.custom(_loss, "loss"), "huber_c": _huber("huber_c"), "huber_schedule": _huber("huber_schedule"),
    "resume": row.custom(_resume), "clip_skip": row.custom(_clip_skip),
    "min_timestep": _timestep_limit("min_timestep", 0), "max_timestep": _timestep_limit("max_timestep", 1000),
    "multires_noise_iterations": row.to("multires_noise_iterations", parse_int, off=True),
    "multires_noise_discount": row.custom(_multires_discount),
    "scale_weight_norms": row.to("scale_weight_norms", parse_number, off=True),
    # `flow.read_times` reads these together
    "weighting_scheme": row.custom(lambda out, name, value: out.note(name, row.ELSEWHERE)),
    "timestep_sampling": row.mapped("timestep_sampling"), "discrete_flow_shift": row.mapped("timestep_shift"),
    "training_shift": row.mapped("timestep_shift"), "sigmoid_scale": row.mapped("logit_std"),
    "logit_mean": row.mapped("logit_std"), "logit_std": row.mapped("logit_std"),
}  # fmt: skip
