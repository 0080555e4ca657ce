"""diffusion-pipe's settings, by their place in its TOML ("optimizer.lr").

    dataset      a file of its own (`datasets`); eval_datasets are not trained on
    [model]      type, files, and how timesteps are sampled: t = sigmoid(sigmoid_scale * normal) or uniform, and then
                 shift t / (1 + (shift - 1) t), or, with flux_shift, by the size of the image as FLUX.1 does
    [adapter]    lora or lokr, with alpha = rank; without it the whole model is trained
    [optimizer]  type and its options (`optimizers`)

SDXL's text encoders are always trained; those of the other models never.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config import row
from inweave.training.config.aliases import precision, save_dtype
from inweave.training.config.toml import parse_toml
from inweave.training.config.translate import SettingRow, Translation, translate
from inweave.training.config.values import is_off, parse_bool, parse_int, parse_number
from inweave.training.importers.defaults import defaults, setting_rows
from inweave.training.importers.diffusion_pipe.datasets import batch_sizes, put_dataset
from inweave.training.importers.diffusion_pipe.optimizers import optimizer_defaults, put_optimizer, put_rates
from inweave.training.importers.files import leaves_of
from inweave.training.importers.models import DIFFUSION_PIPE as FAMILIES
from inweave.training.importers.models import ensure_plain_base, ensure_trainable, refuse_method
from inweave.training.importers.readers import implied_by, min_snr
from inweave.training.importers.source import Importer, Source
from inweave.training.importers.targets import BLOCKS, FLOW

_MARKS = frozenset({"adapter", "micro_batch_size_per_gpu", "pipeline_stages", "activation_checkpointing"})
#: families whose attention has one projection for q, k and v there, and three here
_FUSED = ("flux2", "z_image")
_FILES: Final[dict[str, dict[str, str]]] = {  # where a model is: setting -> part of the model, "" is its base
    "sdxl": {"checkpoint_path": ""}, "sd3": {"diffusers_path": ""},
    "flux": {"diffusers_path": "", "transformer_path": "transformer"},
    "qwen_image": {"diffusers_path": "", "transformer_path": "transformer", "text_encoder_path": "text_encoder",
                   "vae_path": "vae"},
    **{family: {"diffusion_model": "", "vae": "vae"} for family in _FUSED},
}  # fmt: skip
#: every linear layer of the UNet's blocks, and of both text encoders
_SDXL_TARGETS: Final = (
    r"(down_blocks\.\d+|mid_block|up_blocks\.\d+)\.(attentions\.\d+\..+|resnets\.\d+\.time_emb_proj)|"
    r"(text_model\.|encoder\.).*|text_projection"
)


def _recognize(table: Mapping[str, Any]) -> dict[str, Any] | None:
    model, optimizer = table.get("model"), table.get("optimizer")
    if not isinstance(model, Mapping) or not isinstance(model.get("type"), str):
        return None
    own = isinstance(optimizer, Mapping) and "type" in optimizer
    return leaves_of(table) if own or _MARKS & table.keys() else None


def _prepare(source: Source) -> Translation:
    settings = {name: value for name, value in source.settings.items() if value != ""}
    source.unset.extend(source.settings.keys() - settings.keys())
    kind = settings["model.type"]
    family = ensure_trainable(FAMILIES.get(str(kind).lower()), kind, "model.type")
    if not any(name.startswith("adapter.") for name in settings):
        raise refuse_method("adapter", "is missing: a full fine-tune trains the whole model")
    for name, value in settings.items():
        if name.startswith("model.") and name.endswith(("_path", "_model")):
            ensure_plain_base(value, name, editing=family == "flux")
    network = str(settings.get("adapter.type", "lora")).lower()
    sections = ("flow",) if family in FLOW else ()
    values = defaults("diffusion_pipe", "values", *sections, family, network)
    values["adapter.alpha"] = settings.get("adapter.rank")
    values["save_dtype"] = settings.get("adapter.dtype") or settings.get("model.dtype")
    values |= optimizer_defaults(settings)
    if any(name.startswith(("micro_batch_size_per_gpu.", "image_micro_batch_size_per_gpu")) for name in settings):
        values.pop("micro_batch_size_per_gpu")
    implied = {name: value for name, value in implied_by(settings, values).items() if value is not None}
    return source.start(family, {**settings, **implied}, implied)


def _translate(out: Translation, source: Source) -> None:
    for name, example in (
        ("adapter.type", "lora"),
        ("adapter.rank", "32"),
        ("model.dtype", "bfloat16"),
        ("dataset", ""),
    ):
        if is_off(out.get(name)) and name not in out.without:
            out.problems.append(f"{name}: is missing" + (f', such as "{example}"' if example else ""))
    own = {**_file_rows(out), **_FAMILY[out.family]}
    translate(out, own | {name: each for name, each in DIFFUSION_PIPE.items() if name not in own})
    path = out.get("dataset")
    dataset = source.read_file(path, parse_toml) if isinstance(path, str) else None
    put_dataset(out, dataset if isinstance(dataset, Mapping) else None)
    _put_model(out)
    _put_network(out)
    _put_objective(out)
    put_optimizer(out)
    put_rates(out)
    _put_length(out)
    _put_schedule(out)


def _file_rows(out: Translation) -> dict[str, SettingRow]:
    """Return the rows of the files of a model: of its base, and of parts that are somewhere else."""
    files = dict(_FILES[out.family])
    if out.family == "qwen_image" and not out.is_on("model.diffusers_path"):
        files["transformer_path"] = ""  # a file of its own is the base then
    return {f"model.{name}": row.to("model") if not part else _part(part) for name, part in files.items()}


def _part(part: str) -> SettingRow:
    return row.custom(lambda out, name, value: out.add_part(name, part, value))


def _text_encoder(out: Translation, name: str, value: Any) -> None:
    paths = value if isinstance(value, list) else [value]
    if len(paths) != 1 or "text_encoder" in out.fields.get("parts", {}):
        out.refuse(name, f"{for_message(value)}: this model has one text encoder, in one file")
    else:
        out.add_part(name, "text_encoder", paths[0])


def _merged(out: Translation, name: str, value: Any) -> None:
    paths = value if isinstance(value, list) else [value]
    if len(paths) > 1 or "assistant" in out.fields:
        out.refuse(name, f"{for_message(value)}: one adapter is merged at most; merge the others into the model first")
    elif paths:
        out.put(name, "assistant", str(paths[0]))


def _fused_weight(out: Translation, name: str, value: Any) -> None:
    if parse_number(value) == 1:
        out.unset.append(name)
    else:
        out.refuse(name, f"{for_message(value)}: an adapter is merged with a weight of 1")


def _excluded(out: Translation, name: str, value: Any) -> None:
    """Skip modules: a text is an expression for whole names, a list has names or their ends."""
    listed = [rf"(^|\.){re.escape(str(each))}$" for each in value] if isinstance(value, list) else None
    patterns = listed if listed is not None else [rf"^transformer\.({value})$"]
    out.add_rules(name, [{"pattern": pattern, "skip": True} for pattern in patterns])


def _put_model(out: Translation) -> None:
    """Set the variant that a single file for the denoiser alone does not name."""
    if "kontext" in str(out.get("model.transformer_path")).lower():
        out.fields["variant"] = "flux1-kontext-dev"
    if out.family == "sdxl":
        why = "CLIP reads captions in whole chunks of 75 tokens here, not cut to the longest caption of a batch; the "
        out.unsupported("model.type", f"{why}model is given an image's own size and crop here, not those of its bucket")


def _put_network(out: Translation) -> None:
    kind = out.word("adapter.type")
    fields = out.fields
    if kind not in ("lora", "lokr", ""):
        out.refuse_value("adapter.type", "lora and lokr are trained", "network")
    fields["network"] = "lokr" if kind == "lokr" else "lora"
    if kind == "lokr":
        why = "its factors start as in LyCORIS here, the large one at zero; in PEFT the small one does"
        out.unsupported("adapter.type", why)
    elif out.family in _FUSED:
        why = "diffusion-pipe gives the joint projection of q, k, v one adapter; here each has its own"
        out.unsupported("adapter.type", why)
    if not fields.get("start_from"):  # which has modules of its own
        fields["targets"] = [_SDXL_TARGETS if out.family == "sdxl" else BLOCKS]


def _put_objective(out: Translation) -> None:
    fields = out.fields
    if out.family not in FLOW:
        fields |= {"objective": "epsilon", "timestep_sampling": "uniform", "max_token_length": 75 * 20}
        if out.is_on("model.v_pred"):
            why = "is trained with a schedule that ends in pure noise; here the schedule is the model's own"
            out.refuse("model.v_pred", why, "objective")
        return
    fields["objective"] = "flow"
    kind, shift = out.word("model.timestep_sample_method"), out.get("model.shift")
    by_size = is_off(shift) and parse_bool(out.get("model.flux_shift") or False)
    own = out.family == "flux" and "schnell" not in str(fields.get("model")).lower()
    names = ("timestep_sample_method", "sigmoid_scale", "shift", "flux_shift")
    out.mapping |= {f"model.{name}": "timestep_sampling" for name in names if f"model.{name}" in out.settings}
    if kind not in ("logitnormal", "uniform"):
        out.refuse_value("model.timestep_sample_method", "expected logit_normal or uniform", "timestep_sampling")
    elif by_size and not (own and kind == "logitnormal"):
        why = "the shift of FLUX.1 dev by the size of the image, with logit_normal timesteps, is for that model here"
        out.refuse("model.flux_shift", f"{why}; set a fixed one", "timestep_shift")
    fields["timestep_sampling"] = "uniform" if kind == "uniform" else "shift" if by_size and own else "logit_normal"
    if kind != "uniform":
        fields["logit_std"] = parse_number(out.get("model.sigmoid_scale"))
    fields["timestep_shift"] = None if is_off(shift) else parse_number(shift)


def _put_length(out: Translation) -> None:
    """Set the length of the run and its intervals; max_steps may end it before its epochs do."""
    fields, epochs, steps = out.fields, out.get("epochs"), out.get("max_steps")
    if steps is not None and "max_steps" not in out.without:
        out.put("max_steps", "steps", parse_int(steps))
        if epochs is not None:
            why = (
                f"the run has {fields['steps']} steps; where {for_message(epochs)} epochs are fewer, set epochs instead"
            )
            out.unsupported("epochs", why)
    elif epochs is not None:
        out.put("epochs", "epochs", parse_int(epochs))
    elif "epochs" not in out.without:
        out.problems.append("epochs: is missing")
    accumulation = parse_int(out.get("gradient_accumulation_steps"))
    if accumulation > 1:
        why = "diffusion-pipe leaves out the images of a bucket that do not fill a step; here those that fill no batch"
        out.unsupported("gradient_accumulation_steps", why)
    if (examples := out.get("save_every_n_examples")) is not None:
        batch = batch_sizes(out)[0][1] * accumulation
        out.put("save_every_n_examples", "save_every", max(parse_int(examples) // max(batch, 1), 1))


def _put_schedule(out: Translation) -> None:
    """Set the schedule: its curves last for all epochs, from the end of the warmup on."""
    fields, kind = out.fields, out.word("lr_scheduler")
    if out.get("force_constant_lr") is not None:
        fields |= {"lr_scheduler": "constant", "warmup": 0}
        rate = parse_number(out.get("force_constant_lr"))
        fields |= {"learning_rate": rate} | ({"text_encoder_learning_rate": rate} if out.family == "sdxl" else {})
        fields["rules"] = [rule for rule in fields.get("rules", ()) if rule.get("skip")]
        out.mapping |= {"force_constant_lr": "learning_rate", "lr_scheduler": "lr_scheduler"}
        return
    row.choice("lr_scheduler", {each: each for each in ("constant", "linear", "cosine")}).read(
        out, "lr_scheduler", out.get("lr_scheduler")
    )
    if kind == "cosine" and fields.get("learning_rate"):
        fields["lr_min_ratio"] = min(1e-6 / parse_number(fields["learning_rate"]), 1.0)
    if kind in ("linear", "cosine"):
        if "steps" in fields:
            why = "its curve lasts for all epochs, and max_steps ends the run before it does"
            out.refuse("lr_scheduler", f"{for_message(out.get('lr_scheduler'))}: {why}", "lr_scheduler")
        elif fields.get("warmup"):
            out.unsupported("lr_scheduler", "its curve would end warmup_steps after the run; here it ends with the run")


def _debiased(out: Translation, name: str, value: Any) -> None:
    """Set the weighting, which diffusion-pipe uses whenever the setting is there, even as false."""
    out.put(name, "debiased_estimation", True)
    if is_off(value):
        out.unsupported(name, f"{for_message(value)}: is on in diffusion-pipe wherever it is set")


_HUBER = "its loss has another form there, by version; huber and smooth_l1 are pseudo-Huber here"


def _huber(out: Translation, name: str, value: Any) -> None:
    if out.family == "sdxl":
        out.note(name, "is not read by diffusion-pipe for this model")
    else:
        out.refuse(name, f"{for_message(value)}: {_HUBER}", "loss")


def _checkpointing(value: Any) -> str:
    return "full" if str(value).lower() == "unsloth" or parse_bool(value) else "off"


def _uses_wandb(out: Translation) -> bool:
    return out.is_on("monitoring.enable_wandb")


_EXCLUDE: Final = {"adapter.exclude_modules": row.custom(_excluded)}
_OF_COMFY: Final = {
    "model.merge_adapters*": row.custom(_merged), "model.text_encoders.*.path*": row.custom(_text_encoder),
    "adapter.exclude_modules": row.refused("its modules have other names here; set rules"),
}  # fmt: skip
_FAMILY: Final[dict[str, dict[str, SettingRow]]] = {
    "sdxl": {
        "model.min_snr_gamma": min_snr, "model.debiased_estimation_loss": row.custom(_debiased),
        "model.v_pred": row.mapped("objective"),
    },
    "flux": {
        **_EXCLUDE, "model.guidance": row.to("guidance", parse_number),
        "model.bypass_guidance_embedding": row.refused("the model's guidance embedding is always used"),
        "adapter.fuse_adapters.*.path": row.custom(_merged),
        "adapter.fuse_adapters.*.weight": row.custom(_fused_weight),
    },
    "sd3": _EXCLUDE, "qwen_image": _EXCLUDE,
    **dict.fromkeys(_FUSED, _OF_COMFY),
}  # fmt: skip
DIFFUSION_PIPE: Final[dict[str, SettingRow]] = {
    "dataset": row.mapped("dataset"), "model.dtype": precision, "save_dtype": save_dtype,
    "adapter.rank": row.to("rank", parse_int), "lr_scheduler": row.mapped("lr_scheduler"),
    "adapter.rank_dropout": row.refused("PEFT's dropout of a LoKr drops other values"),
    "adapter.decompose_factor": row.to("lokr_factor", parse_int, when=lambda out: out.word("adapter.type") == "lokr",
                                       otherwise=row.NO_PART),
    "activation_checkpointing": row.to("gradient_checkpointing", _checkpointing),
    "save_every_n_epochs": row.to("save_every_epochs", parse_int, off=True),
    "save_every_n_steps": row.to("save_every", parse_int, off=True),
    **row.each(row.mapped("steps"), "max_steps epochs"), "save_every_n_examples": row.mapped("save_every"),
    "force_constant_lr": row.mapped("learning_rate"), "optimizer.*": row.mapped("optimizer"),
    **row.each(row.mapped("learning_rate"), "model.unet_lr model.text_encoder_?_lr"),
    **row.each(row.custom(_huber), "pseudo_huber_c huber_delta smooth_l1_beta"),
    "monitoring.enable_wandb": row.switch("wandb"),
    "monitoring.wandb_tracker_name": row.to("wandb_project", when=_uses_wandb, otherwise=row.LOGS),
    "monitoring.wandb_run_name": row.to("wandb_run_name", when=_uses_wandb, otherwise=row.LOGS),
    **setting_rows("diffusion_pipe"),
}  # fmt: skip

IMPORTER = Importer("diffusion-pipe", _recognize, _prepare, _translate)
