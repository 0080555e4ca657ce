"""Settings as ComfyUI writes them into images: a graph, walked back from the image to the model.

    prompt      {"3": {"class_type": "KSampler", "inputs": {"seed": 5, "model": ["10", 0], ...}}, ...}
    workflow    what the editor shows (`comfy_workflow` makes the same graph of it), used where `prompt` says nothing

    image <- sampler <- latents      Empty...: the size; VAEEncode: the initial image; another sampler: an earlier pass
                     <- conditioning CLIPTextEncode and relatives, through guidance, ControlNet, areas
                     <- model        LoRA loaders, patches, a checkpoint
                     <- seed, steps  numbers, or links to primitives; SamplerCustom(Advanced) has a node for each

The first pass is repeated. A link is followed once, so a circle ends; each node that was not understood is
named in a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from inweave.generate.infotext import not_reproduced, read_sampler
from inweave.generate.prompt import syntax_warnings
from inweave.generate.prompt_edits import literal
from inweave.generate.source import ImageSettings
from inweave.generate.wildcards import escaped

Graph = Mapping[str, Any]
Inputs = Mapping[str, Any]

SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced")
_IGNORED = (
    "VAEDecode", "VAEDecodeTiled", "SaveImage", "PreviewImage", "Note", "MarkdownNote", "Reroute", "PrimitiveNode",
    "CLIPLoader",
    "DualCLIPLoader", "TripleCLIPLoader", "SaveAnimatedWEBP", "Image Save",
)  # fmt: skip
_MAX_WARNINGS = 40
_MAX_BRANCHES = 150  # values and texts that are looked up, of any graph
#: where plain values are in nodes that hold nothing else
_VALUES = (
    "value",
    "Value",
    "string",
    "STRING",
    "text",
    "int",
    "INT",
    "float",
    "FLOAT",
    "number",
    "seed",
    "noise_seed",
    "prompt",
)
_CHECKPOINTS = ("ckpt_name", "unet_name", "base_ckpt_name", "model_name")


def from_comfy(graph: Graph) -> ImageSettings:
    """Return the settings of the first pass of a graph."""
    return _Walk(graph).settings


def has_sampler(graph: object) -> bool:
    """Return whether a graph has a sampler to read."""
    return isinstance(graph, Mapping) and any(_kind(node) in SAMPLERS for node in graph.values())


class _Walk:
    """One way through a graph; ``read`` are the nodes that were understood."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.settings = ImageSettings({"prompt": ""})
        self.read: set[str] = set()
        self._budget = _MAX_BRANCHES
        samplers = [key for key, node in graph.items() if _kind(node) in SAMPLERS]
        self.first = self._first_pass(samplers)
        if self.first is not None:
            self.read.add(self.first)
            self._read_sampler(_inputs(graph[self.first]), _kind(graph[self.first]))
        self._name_the_rest()

    def _first_pass(self, samplers: list[str]) -> str | None:
        """Return the sampler that starts from empty latents on the way to an image, or else the first one."""
        for key, node in self.graph.items():
            if _kind(node) not in ("SaveImage", "PreviewImage"):
                continue
            inputs = ("images", "image", "samples", "latent_image", "latent", "pixels")
            passes = [each for each in self._upstream(key, inputs) if each in samplers]
            if passes:
                return passes[-1]
        return samplers[0] if samplers else None

    def _upstream(self, key: str, names: tuple[str, ...]) -> Iterator[str]:
        """Yield the nodes before one, along the first of these inputs that is a link."""
        seen: set[str] = set()
        while key not in seen:
            seen.add(key)
            yield key
            inputs = _inputs(self.graph.get(key))
            link = next((inputs[name] for name in names if self._target(inputs.get(name)) is not None), None)
            key = self._target(link) or key

    def _target(self, link: object) -> str | None:
        """Return the node that a link, [key, output], comes from, through reroutes."""
        for _ in range(len(self.graph) + 1):
            if not isinstance(link, list) or not link or not isinstance(link[0], str | int):
                return None
            key = str(link[0])
            if key not in self.graph:
                return None
            if "reroute" not in _kind(self.graph[key]).lower():
                return key
            self.read.add(key)
            link = next((value for value in _inputs(self.graph[key]).values() if isinstance(value, list)), None)
        return None

    def _node(self, link: object) -> tuple[str, str, Inputs]:
        """Return (key, class, inputs) of the node that a link comes from; empty if there is none."""
        key = self._target(link)
        return ("", "", {}) if key is None else (key, _kind(self.graph[key]), _inputs(self.graph[key]))

    def _value(self, value: object, depth: int = 0) -> object:
        """Return a plain value, or that of the primitive a link comes from."""
        if not isinstance(value, list):
            return value
        key, kind, inputs = self._node(value)
        if not key or depth > 20 or not self._may_branch():
            return None
        self.read.add(key)
        if kind in ("StringConcatenate", "Text Concatenate", "JoinStrings"):
            delimiter = inputs.get("delimiter", "")
            names = [name for name in inputs if name.startswith(("string", "text")) and name != "delimiter"]
            parts = [text for name in sorted(names) if isinstance(text := self._value(inputs[name], depth + 1), str)]
            return (delimiter if isinstance(delimiter, str) else "").join(parts)
        known = [inputs[name] for name in _VALUES if name in inputs]
        return self._value(known[0], depth + 1) if known else None

    def _number(self, value: object, label: str) -> int | float | None:
        number = self._value(value)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return number
        if value is not None:
            self.settings.warnings.append(not_reproduced(label, number if not isinstance(number, list) else value))
        return None

    # the sampler

    def _read_sampler(self, inputs: Inputs, kind: str) -> None:
        config = self.settings.config
        parts = self._custom_parts(inputs) if kind.startswith("SamplerCustom") else dict(inputs)
        numbers = {"steps": ("steps",), "guidance": ("cfg",), "seed": ("seed", "noise_seed")}
        for ours, names in numbers.items():
            value = next((parts[name] for name in names if parts.get(name) is not None), None)
            if (number := self._number(value, names[0])) is not None:
                config[ours] = number
        sampler, schedule = self._value(parts.get("sampler_name")), self._value(parts.get("scheduler"))
        read_sampler(self.settings, sampler, schedule)
        self._read_partial(parts)
        config["prompt"] = self._text(parts.get("positive"), "positive")
        if negative := self._text(parts.get("negative"), "negative"):
            config["negative_prompt"] = negative
        self._read_latents(parts)
        self._read_model(parts.get("model"), self._clip_chain(parts.get("positive")))

    def _custom_parts(self, inputs: Inputs) -> dict[str, Any]:
        """Return the inputs of a custom sampler as those of a KSampler."""
        parts = dict(inputs)
        for name in ("noise", "guider", "sampler", "sigmas"):
            key, kind, own = self._node(inputs.get(name))
            if not key:
                continue
            if name == "guider":
                parts |= {ours: own[theirs] for theirs, ours in (
                    ("model", "model"), ("conditioning", "positive"), ("positive", "positive"),
                    ("negative", "negative"), ("cfg", "cfg"), ("cond1", "positive")) if theirs in own}  # fmt: skip
            parts |= {
                field: own[field]
                for field in ("noise_seed", "sampler_name", "scheduler", "steps", "denoise")
                if field in own
            }
            if name == "sampler" and "sampler_name" not in own and kind.startswith("Sampler"):
                parts["sampler_name"] = kind.removeprefix("Sampler")
            if name == "sigmas" and "scheduler" not in own and kind.endswith("Scheduler"):
                parts["scheduler"] = kind.removesuffix("Scheduler")
            if kind in ("RandomNoise", "KSamplerSelect", "BasicScheduler", "BasicGuider", "CFGGuider") or name in parts:
                self.read.add(key)
        return parts

    def _read_partial(self, parts: Inputs) -> None:
        """Read KSamplerAdvanced's range of steps."""
        start, end, steps = (self._value(parts.get(name)) for name in ("start_at_step", "end_at_step", "steps"))
        if isinstance(start, int) and start > 0:
            self.settings.warnings.append(not_reproduced("start_at_step", start, "all steps are taken"))
        if isinstance(end, int) and isinstance(steps, int) and 0 <= end < steps:
            self.settings.warnings.append(not_reproduced("end_at_step", end, "all steps are taken"))

    # text

    def _text(self, link: object, side: str) -> str:
        """Return the text of a conditioning, through the nodes that change it."""
        seen: set[str] = set()
        while self._may_branch():
            key, kind, inputs = self._node(link)
            if not key or key in seen:
                return ""
            seen.add(key)
            texts = [value for name in ("text", "text_g", "t5xxl", "prompt", "text_l", "clip_l") if name in inputs
                     and isinstance(value := self._value(inputs[name]), str)]  # fmt: skip
            if kind.startswith(("CLIPTextEncode", "TextEncode")) or (texts and "clip" in inputs):
                self.read.add(key)
                self._read_guidance(inputs)
                if len({*texts}) > 1:
                    hint = "one text is encoded by every text encoder"
                    self.settings.warnings.append(not_reproduced("text of the second encoder", texts[-1], hint))
                if not texts:
                    self.settings.warnings.append(not_reproduced("text", inputs.get("text")))
                warnings = syntax_warnings(texts[0]) if texts else []
                self.settings.warnings += [line for line in warnings if line not in self.settings.warnings]
                return escaped(literal(texts[0])) if texts else ""  # ComfyUI itself knows neither edits nor AND
            if kind == "ConditioningZeroOut":
                self.read.add(key)
                return ""
            if kind == "ConditioningConcat":  # a new chunk of tokens, as BREAK
                self.read.add(key)
                parts = [self._text(inputs.get(name), side) for name in ("conditioning_to", "conditioning_from")]
                return " BREAK ".join(part for part in parts if part)
            if kind == "FluxGuidance":
                self.read.add(key)
                self._read_guidance(inputs)
            link = next((inputs[name] for name in (side, "conditioning", "conditioning_1", "cond1", "positive")
                         if isinstance(inputs.get(name), list)), None)  # fmt: skip
        return ""

    def _may_branch(self) -> bool:
        """Return whether another value may be looked up: nodes that join two others could double the work at each."""
        self._budget -= 1
        return self._budget > 0

    def _read_guidance(self, inputs: Inputs) -> None:
        """Read the guidance of Flux, a conditioning node; the sampler's cfg is then 1."""
        if "guidance" in inputs and (number := self._number(inputs["guidance"], "guidance")) is not None:
            self.settings.config["guidance"] = number

    def _clip_chain(self, link: object) -> list[str] | None:
        """Return the nodes that a prompt's text encoder went through; None if no encoder names one."""
        for key in self._upstream(
            self._target(link) or "", ("conditioning", "conditioning_to", "conditioning_1", "positive")
        ):
            clip = _inputs(self.graph.get(key)).get("clip")
            if (target := self._target(clip)) is not None:
                chain = [*self._upstream(target, ("clip",))]
                for each in chain:
                    layer = self._value(_inputs(self.graph[each]).get("stop_at_clip_layer"))
                    if _kind(self.graph[each]) == "CLIPSetLastLayer" and isinstance(layer, int):
                        self.read.add(each)
                        self.settings.config["clip_skip"] = -layer
                return chain
        return None

    # latents and model

    def _read_latents(self, parts: Inputs) -> None:
        for key in self._upstream(
            self._target(parts.get("latent_image")) or "", ("samples", "latent", "latent_image", "pixels")
        ):
            inputs = _inputs(self.graph.get(key))
            if "width" in inputs and "height" in inputs and not isinstance(inputs.get("samples"), list):
                self.read.add(key)
                for name in ("width", "height"):
                    if isinstance(side := self._value(inputs[name]), int) and not isinstance(side, bool):
                        self.settings.config[name] = side
                if (batch := self._value(inputs.get("batch_size", 1))) != 1:
                    self.settings.warnings.append(not_reproduced("batch_size", batch, "one image is generated"))
                break
            if _kind(self.graph.get(key)).startswith(("VAEEncode", "InpaintModelConditioning", "LoadImage")):
                self.read.add(key)
                self.settings.inputs = ("init",)
        denoise = self._value(parts.get("denoise", 1.0))
        if isinstance(denoise, int | float) and not isinstance(denoise, bool) and 0 <= denoise < 1:
            self.settings.config["strength"] = denoise

    def _read_model(self, link: object, clip_chain: list[str] | None) -> None:
        """Through LoRA loaders and patches to the checkpoint; those on the text encoder's way alone change it alone."""
        loras: list[dict[str, Any]] = []
        chain = [*self._upstream(self._target(link) or "", ("model",))]
        for key in [*chain, *(each for each in clip_chain or () if each not in chain)]:
            inputs = _inputs(self.graph.get(key))
            choices = self._loras(inputs)
            if choices:
                self.read.add(key)
            for choice in choices:
                if key not in chain:
                    choice["unet"] = 0.0
                elif clip_chain is not None and key not in clip_chain:
                    choice["te"] = 0.0
                loras.append(choice)
            name = next((inputs[field] for field in _CHECKPOINTS if isinstance(inputs.get(field), str)), None)
            if name is not None and key in chain:
                self.read.add(key)
                self.settings.model = {"name": _file_name(name)}
        if loras:
            self.settings.config["loras"] = loras[::-1]

    def _loras(self, inputs: Inputs) -> list[dict[str, Any]]:
        """Return the LoRAs of a loader: one, or rows of {on, lora, strength}."""
        name = self._value(inputs.get("lora_name"))
        if isinstance(name, str):
            unet = self._strength(inputs.get("strength_model", 1.0))
            te = self._strength(inputs.get("strength_clip", unet if "clip" in inputs else 0.0))
            return [{"name": name.removesuffix(".safetensors"), "te": te, "unet": unet}]
        rows = [row for row in inputs.values() if isinstance(row, Mapping) and isinstance(row.get("lora"), str)]
        choices = []
        for row in reversed([row for row in rows if row.get("on", True) is True]):
            unet = self._strength(row.get("strength", 1.0))
            te = unet if row.get("strengthTwo") is None else self._strength(row["strengthTwo"])
            choices.append({"name": row["lora"].removesuffix(".safetensors"), "te": te, "unet": unet})
        return choices

    def _strength(self, value: object) -> object:
        number = self._value(value)
        return 1.0 if number is None else number

    def _name_the_rest(self) -> None:
        rest = [(key, node) for key, node in self.graph.items() if key not in self.read and _kind(node) not in _IGNORED]
        for key, node in rest[:_MAX_WARNINGS]:
            kind = _kind(node)
            hint = "the first pass is repeated" if kind in SAMPLERS else None
            self.settings.warnings.append(not_reproduced(f"node {key[:40]}", kind or node, hint))
        if len(rest) > _MAX_WARNINGS:
            self.settings.warnings.append(f"{len(rest) - _MAX_WARNINGS} more nodes are not reproduced")


def _file_name(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2].removesuffix(".safetensors")


def _inputs(node: object) -> Inputs:
    inputs = node.get("inputs") if isinstance(node, Mapping) else None
    return inputs if isinstance(inputs, Mapping) else {}


def _kind(node: object) -> str:
    kind = node.get("class_type") if isinstance(node, Mapping) else None
    return kind if isinstance(kind, str) else ""
