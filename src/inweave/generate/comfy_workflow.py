"""ComfyUI's `workflow`, which its editor shows, as the graph that `prompt` holds.

    {"nodes": [{"id": 3, "type": "KSampler", "mode": 0, "inputs": [{"name": "model", "link": 7}], "widgets_values": [5,
    "fixed", 20, ...]}],
     "links": [[7, 10, 0, 3, 0, "MODEL"]]}         link, from node, from output, to node, to input, type

Values of widgets have no names here: those of the nodes that matter are listed below in their order, with "" for what
the editor adds ("control after generate"). A muted node (mode 2) is gone; a bypassed one (mode 4) hands on its first
input of the same type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIZE = ("width", "height", "batch_size")
WIDGETS: dict[str, tuple[str, ...]] = {
    "KSampler": ("seed", "", "steps", "cfg", "sampler_name", "scheduler", "denoise"),
    "KSamplerAdvanced": ("add_noise", "noise_seed", "", "steps", "cfg", "sampler_name", "scheduler", "start_at_step",
                         "end_at_step"),
    "SamplerCustom": ("add_noise", "noise_seed", "", "cfg"),
    "RandomNoise": ("noise_seed",), "KSamplerSelect": ("sampler_name",),
    "BasicScheduler": ("scheduler", "steps", "denoise"),
    "SDTurboScheduler": ("steps", "denoise"), "KarrasScheduler": ("steps",), "ExponentialScheduler": ("steps",),
    "AlignYourStepsScheduler": ("model_type", "steps", "denoise"), "CFGGuider": ("cfg",), "FluxGuidance": ("guidance",),
    "CLIPTextEncode": ("text",), "CLIPTextEncodeFlux": ("clip_l", "t5xxl", "guidance"),
    "CLIPTextEncodeSDXL": ("width", "height", "crop_w", "crop_h", "target_width", "target_height", "text_g", "text_l"),
    "CLIPSetLastLayer": ("stop_at_clip_layer",),
    "LoraLoader": ("lora_name", "strength_model", "strength_clip"),
    "LoraLoaderModelOnly": ("lora_name", "strength_model"),
    "CheckpointLoaderSimple": ("ckpt_name",), "CheckpointLoader": ("config_name", "ckpt_name"),
    "UNETLoader": ("unet_name",),
    "UnetLoaderGGUF": ("unet_name",), "unCLIPCheckpointLoader": ("ckpt_name",),
    "EmptyLatentImage": _SIZE, "EmptySD3LatentImage": _SIZE,
    "EmptyHunyuanLatentVideo": ("width", "height", "length", "batch_size"),
    "PrimitiveNode": ("value",), "PrimitiveInt": ("value",), "PrimitiveFloat": ("value",),
    "PrimitiveString": ("value",),
    "PrimitiveStringMultiline": ("value",), "StringConcatenate": ("string_a", "string_b", "delimiter"),
    "VAELoader": ("vae_name",),
}  # fmt: skip
_MUTED, _BYPASSED = 2, 4


def graph_of(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nodes by their ids, with class, values and links; other entries are dropped."""
    nodes = {str(node.get("id")): node for node in _list(workflow.get("nodes")) if isinstance(node, Mapping)}
    links = {
        number: link for each in _list(workflow.get("links")) if (number := _link(each)[0]) and (link := _link(each)[1])
    }
    graph: dict[str, Any] = {}
    for key, node in nodes.items():
        kind = node.get("type")
        if not isinstance(kind, str) or node.get("mode") == _MUTED:
            continue
        if node.get("mode") == _BYPASSED:
            graph[key] = {"class_type": "Reroute", "inputs": _passed_on(node, links)}
            continue
        graph[key] = {
            "class_type": kind,
            "inputs": {**_widgets(kind, node.get("widgets_values")), **_links(node, links)},
        }
    return graph


def _link(link: object) -> tuple[str, list[Any] | None]:
    """Return (number, [node, output]) of a link, in either of its two forms."""
    if isinstance(link, list) and len(link) >= 3 and isinstance(link[1], str | int) and isinstance(link[2], int):
        return str(link[0]), [str(link[1]), link[2]]
    if isinstance(link, Mapping) and isinstance(link.get("origin_id"), str | int):
        return str(link.get("id")), [str(link["origin_id"]), link.get("origin_slot")]
    return "", None


def _links(node: Mapping[str, Any], links: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    rows = [row for row in _list(node.get("inputs")) if isinstance(row, Mapping)]
    return {str(row.get("name")): links[str(row["link"])] for row in rows if str(row.get("link")) in links}


def _passed_on(node: Mapping[str, Any], links: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the input that a bypassed node hands on: the first of the type of its first output."""
    outputs = [row.get("type") for row in _list(node.get("outputs")) if isinstance(row, Mapping)]
    for row in _list(node.get("inputs")):
        if isinstance(row, Mapping) and str(row.get("link")) in links and row.get("type") in outputs[:1]:
            return {"": links[str(row["link"])]}
    return {}


def _widgets(kind: str, values: object) -> dict[str, Any]:
    if isinstance(values, Mapping):
        return {str(name): value for name, value in values.items()}
    if not isinstance(values, list):
        return {}
    if kind not in WIDGETS:  # rows of a loader of several LoRAs name themselves
        return {f"row {number}": row for number, row in enumerate(values) if isinstance(row, Mapping)}
    return {
        name: value for name, value in zip(WIDGETS[kind], values, strict=False) if name and not isinstance(value, list)
    }


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
