"""Settings as ComfyUI and InvokeAI write them into images.

    ComfyUI    PNG text `prompt`: the graph, {"3": {"class_type": "KSampler", "inputs": {"model": ["10", 0], ...}}, ...}.
               From the first KSampler the links lead to its prompts, its latents, and through LoRA loaders to a checkpoint
    InvokeAI   PNG text `invokeai_metadata`: one table

Nodes and fields that are not understood are each named in a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.generate.infotext import not_reproduced, read_sampler
from inweave.generate.prompt import syntax_warnings
from inweave.generate.source import ImageSettings

Graph = Mapping[str, Any]

_SAMPLERS = ("KSampler", "KSamplerAdvanced")
_OUTPUTS = ("VAEDecode", "SaveImage", "PreviewImage", "Note", "MarkdownNote")
_LINKS = 200  # a chain longer than this is a circle


def from_comfy(graph: Graph) -> ImageSettings:
    """The settings of a graph with one sampler."""
    settings = ImageSettings({"prompt": ""})
    read: set[str] = set()
    samplers = [key for key, node in graph.items() if _kind(node) in _SAMPLERS]
    if samplers:
        read.add(samplers[0])
        _read_sampler_node(settings, graph, _inputs(graph[samplers[0]]), read)
    for key, node in graph.items():
        kind = _kind(node)
        if key not in read and kind not in _OUTPUTS:
            hint = "the first sampler is used" if kind in _SAMPLERS else None
            settings.warnings.append(not_reproduced(f"node {key}", kind or node, hint))
    return settings


def _read_sampler_node(settings: ImageSettings, graph: Graph, inputs: Mapping[str, Any], read: set[str]) -> None:
    config = settings.config
    numbers = {"steps": ("steps",), "guidance": ("cfg",), "seed": ("seed", "noise_seed")}
    for ours, names in numbers.items():
        value = next((inputs[name] for name in names if name in inputs), None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            config[ours] = value
        elif value is not None:
            settings.warnings.append(not_reproduced(names[0], value))
    read_sampler(settings, inputs.get("sampler_name"), inputs.get("scheduler"))
    config["prompt"] = _text(settings, graph, inputs.get("positive"), read)
    if negative := _text(settings, graph, inputs.get("negative"), read):
        config["negative_prompt"] = negative
    _read_latents(settings, graph, inputs, read)
    _read_model(settings, graph, inputs.get("model"), read)


def _text(settings: ImageSettings, graph: Graph, link: object, read: set[str]) -> str:
    key, node = _linked(graph, link)
    if node is None or _kind(node) != "CLIPTextEncode":
        return ""
    read.add(key)
    text = _inputs(node).get("text")
    if not isinstance(text, str):
        settings.warnings.append(not_reproduced("text", text))
        return ""
    settings.warnings += [line for line in syntax_warnings(text) if line not in settings.warnings]
    _, skip = _linked(graph, _inputs(node).get("clip"))
    layer = _inputs(skip).get("stop_at_clip_layer") if skip is not None else None
    if _kind(skip) == "CLIPSetLastLayer" and isinstance(layer, int):
        read.add(_linked(graph, _inputs(node).get("clip"))[0])
        settings.config["clip_skip"] = -layer
    return text


def _read_latents(settings: ImageSettings, graph: Graph, inputs: Mapping[str, Any], read: set[str]) -> None:
    key, node = _linked(graph, inputs.get("latent_image"))
    if node is not None and _kind(node).startswith("Empty"):
        read.add(key)
        sizes = _inputs(node)
        settings.config |= {name: sizes[name] for name in ("width", "height") if isinstance(sizes.get(name), int)}
        if sizes.get("batch_size", 1) != 1:
            settings.warnings.append(not_reproduced("batch_size", sizes["batch_size"], "one image is generated"))
    elif node is not None:
        settings.inputs = ("init",)
    denoise = inputs.get("denoise", 1.0)
    if isinstance(denoise, int | float) and 0 <= denoise < 1:
        settings.config["strength"] = denoise


def _read_model(settings: ImageSettings, graph: Graph, link: object, read: set[str]) -> None:
    """Through the LoRA loaders to the checkpoint."""
    loras: list[dict[str, Any]] = []
    for _ in range(_LINKS):
        key, node = _linked(graph, link)
        if node is None or key in read:
            break
        inputs, kind = _inputs(node), _kind(node)
        if kind in ("LoraLoader", "LoraLoaderModelOnly") and isinstance(inputs.get("lora_name"), str):
            unet = inputs.get("strength_model", 1.0)
            te = inputs.get("strength_clip", 0.0 if kind.endswith("Only") else unet)
            loras.append({"name": inputs["lora_name"].removesuffix(".safetensors"), "te": te, "unet": unet})
        elif isinstance(name := inputs.get("ckpt_name", inputs.get("unet_name")), str):
            settings.model = {"name": name.replace("\\", "/").rpartition("/")[2].removesuffix(".safetensors")}
        else:
            break
        read.add(key)
        link = inputs.get("model")
    if loras:
        settings.config["loras"] = loras[::-1]


def _linked(graph: Graph, link: object) -> tuple[str, Any]:
    """(key, node) at the end of a link, [key, output]."""
    if isinstance(link, list) and link and isinstance(link[0], str) and link[0] in graph:
        return link[0], graph[link[0]]
    return "", None


def _inputs(node: object) -> Mapping[str, Any]:
    inputs = node.get("inputs") if isinstance(node, Mapping) else None
    return inputs if isinstance(inputs, Mapping) else {}


def _kind(node: object) -> str:
    kind = node.get("class_type") if isinstance(node, Mapping) else None
    return kind if isinstance(kind, str) else ""


_FIELDS = {
    "positive_prompt": "prompt", "negative_prompt": "negative_prompt", "steps": "steps", "cfg_scale": "guidance",
    "seed": "seed", "width": "width", "height": "height",
}  # fmt: skip
_HISTORY = ("generation_mode", "app_version", "created_by", "rand_device", "metadata_version")


def from_invoke(table: Mapping[str, Any]) -> ImageSettings:
    """The settings of InvokeAI's table."""
    settings = ImageSettings({"prompt": ""})
    fields = {name: value for name, value in table.items() if value not in (None, "", [], {}, False, 0)}
    for theirs, ours in _FIELDS.items():
        if theirs in table and table[theirs] is not None:
            settings.config[ours] = table[theirs]
        fields.pop(theirs, None)
    read_sampler(settings, fields.pop("scheduler", None), None)
    model = fields.pop("model", None)
    if isinstance(model, Mapping):
        settings.model = {"name": model.get("name") or model.get("model_name"), "hash": _digits(model.get("hash"))}
    skipped = fields.pop("clip_skip", 0)
    if isinstance(skipped, int) and skipped > 0:
        settings.config["clip_skip"] = skipped + 1
    loras = fields.pop("loras", [])
    for entry in loras if isinstance(loras, list) else [loras]:
        about = (entry.get("model") or entry.get("lora")) if isinstance(entry, Mapping) else None
        name = (about.get("name") or about.get("model_name")) if isinstance(about, Mapping) else None
        if not isinstance(name, str) or not isinstance(entry, Mapping):
            settings.warnings.append(not_reproduced("loras", entry))
            continue
        settings.config.setdefault("loras", []).append({"name": name, "strength": entry.get("weight", 1.0)})
        if isinstance(about, Mapping) and isinstance(digits := _digits(about.get("hash")), str):
            settings.hashes[name] = digits
    if "strength" in fields and ("init_image" in fields or "img2img" in str(table.get("generation_mode"))):
        settings.config["strength"] = fields.pop("strength")
        fields.pop("init_image", None)
        settings.inputs = ("init",)
    settings.warnings += [not_reproduced(name, value) for name, value in fields.items() if name not in _HISTORY]
    return settings


def _digits(text: object) -> object:
    return text.rpartition(":")[2] if isinstance(text, str) else None
