"""OneTrainer's settings of components, intervals with a unit, and timestep distributions.

unet, transformer, text_encoder, ...   train, learning_rate, weight_dtype, stop_training_after, ...
save_every + save_every_unit           STEP, EPOCH, NEVER, and units of time, which cannot be counted in
timestep_distribution                  UNIFORM; LOGIT_NORMAL with noising_bias, noising_weight and a shift
"""

from __future__ import annotations

from typing import Any

from inweave.checked import for_message
from inweave.training.config import row
from inweave.training.config.aliases import PRECISIONS
from inweave.training.config.translate import SettingRow, Translation
from inweave.training.config.values import is_off, normalize_name, parse_bool, parse_int, parse_number
from inweave.training.importers.targets import FLOW

#: text encoders that cannot be trained here, by family
_FROZEN = {"flux": ("text_encoder_2",), "sd3": ("text_encoder_3",), "qwen_image": ("text_encoder",),
           "z_image": ("text_encoder",), "flux2": ("text_encoder",)}  # fmt: skip
_UNUSED = "does not change this run"


def networks_of(family: str) -> tuple[str, tuple[str, ...]]:
    """Return OneTrainer's names of (the denoiser, the text encoders) of a family."""
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    return ("transformer" if family in FLOW else "unet"), encoders[: {"sdxl": 2, "sd3": 3, "flux": 2}.get(family, 1)]


def _trained(out: Translation) -> list[str]:
    """Return the text encoders that the file trains."""
    return [each for each in networks_of(out.family)[1] if parse_bool(out.get(f"{each}.train", True))]


def _number(component: str) -> str:
    return component.removeprefix("text_encoder").lstrip("_") or "1"


def _train_encoder(out: Translation, name: str, value: Any) -> None:
    usable = any(each not in _FROZEN.get(out.family, ()) for each in _trained(out))
    out.put(name, "train_text_encoders", usable)
    if usable and not parse_bool(value):
        out.add_rules(name, [{"pattern": rf"^te{_number(name.partition('.')[0])}\.", "skip": True}])


def _encoder_rate(out: Translation, name: str, value: Any) -> None:
    component = name.partition(".")[0]
    if component not in _trained(out):
        out.note(name, _UNUSED)
    elif "text_encoder_learning_rate" not in out.fields:
        out.put(name, "text_encoder_learning_rate", value)
    elif parse_number(value) != parse_number(out.fields["text_encoder_learning_rate"]):
        out.add_rules(name, [{"pattern": rf"^te{_number(component)}\.", "learning_rate": parse_number(value)}])
    else:
        out.mapping[name] = "text_encoder_learning_rate"


def _encoder_dropout(out: Translation, name: str, value: Any) -> None:
    if is_off(value):
        out.note(name, _UNUSED)
    elif out.fields.get("caption_dropout", parse_number(value)) == parse_number(value):
        out.put(name, "caption_dropout", parse_number(value))
    else:
        out.unsupported(name, "captions are dropped for all text encoders at once")


def _weight_dtype(out: Translation, name: str, value: Any) -> None:
    if normalize_name(value) in (*PRECISIONS, "none", "tfloat32"):
        out.note(name, _UNUSED)
    else:
        out.unsupported(name, f"{for_message(value)}: {row.MEMORY}")


def _stop(out: Translation, name: str, value: Any) -> None:
    unit = normalize_name(out.get(f"{name}_unit", "never"))
    epochs = parse_number(out.get("epochs") or 100)
    denoiser, trained = networks_of(out.family)[0], _trained(out)
    keys = ("stop_training_after", "stop_training_after_unit")
    alike = len({tuple(str(out.get(f"{each}.{key}")) for key in keys) for each in trained}) == 1
    if name.partition(".")[0] not in (denoiser, *trained):
        out.note(name, _UNUSED)
    elif is_off(value) or unit == "never" or (unit == "epoch" and parse_number(value) >= epochs):
        out.unset.append(name)
    elif name.startswith(denoiser):
        out.refuse(name, f"{for_message(value)} {unit}s: the denoiser is trained to the end")
    elif unit not in ("epoch", "step"):
        out.refuse(name, f"{for_message(value)} {unit}s: text encoders stop after steps or epochs")
    elif not alike:
        out.refuse(name, f"{for_message(value)} {unit}s: all text encoders stop at the same step")
    else:  # epochs as a part of the run, whose length in steps the dataset decides
        out.put(name, "text_encoder_stop", parse_number(value) / epochs if unit == "epoch" else parse_int(value))


_COMPONENT = {
    "model_name": row.custom(lambda out, name, value: out.add_part(name, name.partition(".")[0], value)),
    "weight_dtype": row.custom(_weight_dtype), "attention_mask": row.different("prompts are encoded as in generation"),
    **row.each(row.different(row.MEMORY), "offload_fraction activation_offloading"),
}  # fmt: skip
_DENOISER = {
    "train": row.to("train_denoiser", parse_bool), "learning_rate": row.to("learning_rate"),
    "gradient_checkpointing": row.switch("gradient_checkpointing", "full", "off"),
    "guidance_scale": row.to("guidance", parse_number, when=lambda out: out.family in ("flux", "flux2"),
                             otherwise=_UNUSED),
    "stop_training_after": row.custom(_stop),
}  # fmt: skip
_ENCODER = {
    "train": row.custom(_train_encoder), "learning_rate": row.custom(_encoder_rate),
    "dropout_probability": row.custom(_encoder_dropout), "stop_training_after": row.custom(_stop),
}  # fmt: skip


def part_rows(family: str) -> dict[str, SettingRow]:
    """Return the rows of the components that a family has, and of those that it lacks."""
    denoiser, encoders = networks_of(family)
    parts = {denoiser: _DENOISER, **dict.fromkeys(encoders, _ENCODER), "vae": {}}
    rows = {f"{part}.{key}": each for part, own in parts.items() for key, each in {**_COMPONENT, **own}.items()}
    frozen = row.refused("this text encoder is not trained")
    rows |= {f"{encoder}.train": frozen for encoder in _FROZEN.get(family, ())}
    rows |= row.each(row.ignored(_UNUSED), " ".join(f"{part}.*" for part in parts))
    others = "unet.* transformer.* text_encoder.* text_encoder_?.* prior.*"
    for name, each in row.each(row.ignored("this model type has no such component"), others).items():
        rows.setdefault(name, each)
    return rows


def rate(out: Translation, name: str, value: Any) -> None:
    """Set the learning rate of the components that have none of their own."""
    denoiser, encoders = networks_of(out.family)
    if out.get(f"{denoiser}.learning_rate") is None:
        out.put(name, "learning_rate", value)
    elif all(out.get(f"{each}.learning_rate") is None for each in encoders):
        out.put(name, "text_encoder_learning_rate", value)
    else:
        out.note(name, "the components have learning rates of their own")


def every(steps: str, epochs: str) -> SettingRow:
    """Return the row of an interval with a unit of its own."""

    def read(out: Translation, name: str, value: Any) -> None:
        unit = normalize_name(out.get(f"{name}_unit") or out.get("save_after_unit") or "step")
        if unit in ("step", "never", "always"):
            out.put(name, steps, 1 if unit == "always" else parse_int(value) if unit == "step" else 0)
        elif unit == "epoch":
            out.put(name, epochs, parse_int(value))
        elif steps == "sample_every":
            out.note(name, f"counts in {for_message(unit)}; samples are generated by steps or epochs")
        else:
            out.unsupported(name, f"counts in {for_message(unit)}; {steps} is in steps")

    return row.custom(read)


def put_times(out: Translation) -> None:
    """Set how timesteps are sampled; a shift, fixed or by resolution, is for flow models."""
    kind = normalize_name(out.get("timestep_distribution"))
    flow = out.family in FLOW
    shift = parse_number(out.get("timestep_shift") or 1)
    moves = parse_bool(out.get("dynamic_timestep_shifting") or False)
    bias, weight = parse_number(out.get("noising_bias") or 0), parse_number(out.get("noising_weight") or 0)
    fields: dict[str, Any] = {}
    factor = shift if flow and shift != 1 else None
    whole = not out.is_on("min_noising_strength") and parse_number(out.get("max_noising_strength", 1) or 1) == 1
    if flow and not whole and (moves or factor):
        why = "OneTrainer chooses a range of noise levels before the shift, inweave after it"
        out.refuse("timestep_shift", why, "timestep_shift")
    if not flow and shift != 1:
        why = f"{shift:g}: models that predict noise sample timesteps without a shift"
        out.refuse("timestep_shift", why, "timestep_shift")
    if kind == "uniform" and not (flow and moves):
        fields = {"timestep_sampling": "uniform", "timestep_shift": factor}
    elif kind == "logitnormal" and flow and bias == 0 and (moves or factor):
        fields = {"timestep_sampling": "shift", "logit_std": weight + 1, "timestep_shift": None if moves else factor}
    elif kind == "logitnormal" and flow and not moves:
        fields = {"timestep_sampling": "logit_normal", "logit_mean": bias, "logit_std": weight + 1}
        fields["timestep_shift"] = factor
    if fields:
        out.fields |= fields
        out.mapping["timestep_distribution"] = "timestep_sampling"
    else:
        shifted = " with a shift by resolution" if flow and moves else ""
        why = f"{for_message(out.get('timestep_distribution'))}{shifted} has no equivalent"
        out.refuse("timestep_distribution", why, "timestep_sampling")
    out.fields.setdefault("objective", "flow" if flow else "auto")


def put_limits(out: Translation) -> None:
    """Set the part of the schedule that is trained."""
    for name, ours, whole in (
        ("min_noising_strength", "min_timestep", 0.0),
        ("max_noising_strength", "max_timestep", 1.0),
    ):
        value = parse_number(out.get(name)) if out.get(name) is not None else whole
        if value != whole:
            out.fields[ours] = round(value * 1000)
            out.mapping[name] = ours
