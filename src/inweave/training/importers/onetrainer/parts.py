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
           "z_image": ("text_encoder",)}  # fmt: skip


def networks_of(family: str) -> tuple[str, tuple[str, ...]]:
    """Return OneTrainer's names of (the denoiser, the text encoders) of a family."""
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    return ("transformer" if family in FLOW else "unet"), encoders[: {"sdxl": 2, "sd3": 3, "flux": 2}.get(family, 1)]


def part(out: Translation, name: str, value: Any) -> None:
    """Translate one setting of one component."""
    component, _, key = name.partition(".")
    denoiser, encoders = networks_of(out.family)
    trained = {each: parse_bool(out.get(f"{each}.train", True)) for each in encoders}
    if component not in (denoiser, *encoders, "vae"):
        out.note(name, "this model type has no such component")
    elif key == "train" and component == denoiser:
        out.put(name, "train_denoiser", parse_bool(value))
    elif key == "train" and component in _FROZEN.get(out.family, ()):
        if parse_bool(value):
            out.refuse(name, "this text encoder is not trained")
        else:
            out.unset.append(name)
    elif key == "train" and component in encoders:
        usable = {each: on for each, on in trained.items() if each not in _FROZEN.get(out.family, ())}
        out.put(name, "train_text_encoders", any(usable.values()))
        if any(usable.values()) and not parse_bool(value):
            number = component.removeprefix("text_encoder").lstrip("_") or "1"
            out.add_rules(name, [{"pattern": rf"^te{number}\.", "skip": True}])
    elif key == "learning_rate" and component == denoiser:
        out.put(name, "learning_rate", value)
    elif key == "learning_rate" and trained.get(component):
        _encoder_rate(out, name, component, value)
    elif key == "model_name":
        out.add_part(name, component, value)
    elif key == "weight_dtype" and normalize_name(value) not in (*PRECISIONS, "none", "tfloat32"):
        out.unsupported(name, f"{for_message(value)}: {row.MEMORY}")
    elif key == "dropout_probability" and component in encoders and parse_number(value) > 0:
        if out.fields.get("caption_dropout", parse_number(value)) == parse_number(value):
            out.put(name, "caption_dropout", parse_number(value))
        else:
            out.unsupported(name, "captions are dropped for all text encoders at once")
    elif key == "guidance_scale" and component == denoiser and out.family == "flux":
        out.put(name, "guidance", parse_number(value))
    elif key == "gradient_checkpointing" and component == denoiser:
        out.put(name, "gradient_checkpointing", "full" if parse_bool(value) else "off")
    elif key in ("offload_fraction", "activation_offloading") and not is_off(value):
        out.unsupported(name, row.MEMORY)
    elif key == "stop_training_after" and trained.get(component, component == denoiser):
        _stop(out, name, value)
    elif key == "attention_mask" and parse_bool(value):
        out.unsupported(name, "prompts are encoded as in generation")
    else:
        out.note(name, "does not change this run")


def _encoder_rate(out: Translation, name: str, component: str, value: Any) -> None:
    if "text_encoder_learning_rate" not in out.fields:
        out.put(name, "text_encoder_learning_rate", value)
    elif parse_number(value) != parse_number(out.fields["text_encoder_learning_rate"]):
        number = component.rpartition("_")[2]
        out.add_rules(name, [{"pattern": rf"^te{number}\.", "learning_rate": parse_number(value)}])
    else:
        out.mapping[name] = "text_encoder_learning_rate"


def _stop(out: Translation, name: str, value: Any) -> None:
    unit = normalize_name(out.get(f"{name}_unit", "never"))
    epochs = parse_number(out.get("epochs") or 100)
    denoiser, encoders = networks_of(out.family)
    trained = [each for each in encoders if parse_bool(out.get(f"{each}.train", True))]
    keys = ("stop_training_after", "stop_training_after_unit")
    alike = len({tuple(str(out.get(f"{each}.{key}")) for key in keys) for each in trained}) == 1
    if is_off(value) or unit == "never" or (unit == "epoch" and parse_number(value) >= epochs):
        out.unset.append(name)
    elif name.startswith(denoiser):
        out.refuse(name, f"{for_message(value)} {unit}s: the denoiser is trained to the end")
    elif unit not in ("epoch", "step"):
        out.refuse(name, f"{for_message(value)} {unit}s: text encoders stop after steps or epochs")
    elif not alike:
        out.refuse(name, f"{for_message(value)} {unit}s: all text encoders stop at the same step")
    else:  # epochs as a part of the run, whose length in steps the dataset decides
        out.put(name, "text_encoder_stop", parse_number(value) / epochs if unit == "epoch" else parse_int(value))


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
