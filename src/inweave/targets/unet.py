"""The UNets of SD 1.x, 2.x, SDXL and their relatives: diffusers <-> ldm/sgm block names.

The ldm side numbers everything in one row, so the table depends on the model's own structure:

    conv_in                            input_blocks.0.0
    down_blocks.i.resnets.j            input_blocks.n.0        n counts resnets and downsamplers
    down_blocks.i.attentions.j         input_blocks.n.1
    down_blocks.i.downsamplers.0.conv  input_blocks.n.0.op
    mid_block.resnets.0 / attentions.0 / resnets.1             middle_block.0 / .1 / .2
    up_blocks.i.resnets.j              output_blocks.n.0
    up_blocks.i.attentions.j           output_blocks.n.1
    up_blocks.i.upsamplers.0.conv      output_blocks.n.K.conv  K = 2 where that block has attention, else 1

It is walked from whichever side the names at hand are on. Names inside a transformer are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from inweave.targets.links import Link, Naming, Shape

_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
_FIXED = {
    "conv_in": "input_blocks.0.0", "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0", "conv_out": "out.2",
}  # fmt: skip
_DIFFUSERS = re.compile(r"(down_blocks|up_blocks)\.\d+\.|mid_block\.")
_LDM = re.compile(r"(input_blocks|output_blocks)\.\d+\.|middle_block\.")


class UnetTable:
    name = "unet"
    divides = False

    def links(self, shapes: Mapping[str, Shape], naming: Naming) -> list[Link]:
        pairs = _pairs_from_diffusers(shapes) if naming == "diffusers" else _pairs_from_ldm(shapes)
        if naming == "original":
            pairs = {ldm: part for part, ldm in pairs.items()}
        links = []
        for name, shape in shapes.items():
            other = _renamed(name, pairs)
            part, original = (name, other) if naming == "diffusers" else (other, name)
            links.append(Link(part, shape, original))
        return links

    def coverage(self, names: Iterable[str]) -> dict[Naming, int]:
        names = list(names)
        fixed, fixed_ldm = tuple(_FIXED), tuple(_FIXED.values())
        return {
            "diffusers": sum(1 for n in names if _DIFFUSERS.match(n) or n.startswith(fixed)),
            "original": sum(1 for n in names if _LDM.match(n) or n.startswith(fixed_ldm)),
        }

    def aliases(self, links: list[Link]) -> dict[str, tuple[str, ...]]:
        return {}


def _renamed(name: str, pairs: Mapping[str, str]) -> str:
    """Swap the longest known module prefix of a tensor name."""
    head = name
    while head:
        head = head.rpartition(".")[0]
        if head in pairs:
            return pairs[head] + name[len(head) :]
    return name


def _resnet(pairs: dict[str, str], part: str, ldm: str) -> None:
    pairs[part] = ldm
    for leaf, ldm_leaf in _RESNET.items():
        pairs[f"{part}.{leaf}"] = f"{ldm}.{ldm_leaf}"


def _numbers(names: Iterable[str], prefix: str) -> list[int]:
    """Return the numbers that follow ``prefix`` in any name."""
    start = len(prefix)
    return sorted({int(n[start:].split(".", 1)[0]) for n in names if n.startswith(prefix)})


def _pairs_from_diffusers(names: Iterable[str]) -> dict[str, str]:
    modules = sorted({m[0] for n in names if (m := re.match(r"(?:\w+_blocks\.\d+|mid_block)\.\w+\.\d+\.", n))})
    pairs = dict(_FIXED)
    position = 1
    for i in _numbers(modules, "down_blocks."):
        block = f"down_blocks.{i}"
        attentions = _numbers(modules, f"{block}.attentions.")
        for j in _numbers(modules, f"{block}.resnets."):
            _resnet(pairs, f"{block}.resnets.{j}", f"input_blocks.{position}.0")
            if j in attentions:
                pairs[f"{block}.attentions.{j}"] = f"input_blocks.{position}.1"
            position += 1
        if _numbers(modules, f"{block}.downsamplers."):
            pairs[f"{block}.downsamplers.0.conv"] = f"input_blocks.{position}.0.op"
            position += 1
    _middle(pairs, bool(_numbers(modules, "mid_block.attentions.")))
    position = 0
    for i in _numbers(modules, "up_blocks."):
        block = f"up_blocks.{i}"
        attentions = _numbers(modules, f"{block}.attentions.")
        for j in _numbers(modules, f"{block}.resnets."):
            _resnet(pairs, f"{block}.resnets.{j}", f"output_blocks.{position}.0")
            if j in attentions:
                pairs[f"{block}.attentions.{j}"] = f"output_blocks.{position}.1"
            position += 1
        if _numbers(modules, f"{block}.upsamplers."):
            pairs[f"{block}.upsamplers.0.conv"] = f"output_blocks.{position - 1}.{2 if attentions else 1}.conv"
    return pairs


def _pairs_from_ldm(names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    modules = {
        m[0] for n in names if (m := re.match(r"(?:input|output|middle)_blocks?\.\d+\.(?:\d+\.)?(?:op\.|conv\.)?", n))
    }
    pairs = dict(_FIXED)
    i = j = 0
    for position in _numbers(modules, "input_blocks."):
        if position == 0:
            continue
        if f"input_blocks.{position}.0.op." in modules:
            pairs[f"down_blocks.{i}.downsamplers.0.conv"] = f"input_blocks.{position}.0.op"
            i, j = i + 1, 0
            continue
        _resnet(pairs, f"down_blocks.{i}.resnets.{j}", f"input_blocks.{position}.0")
        if f"input_blocks.{position}.1." in modules:
            pairs[f"down_blocks.{i}.attentions.{j}"] = f"input_blocks.{position}.1"
        j += 1
    _middle(pairs, any(name.startswith("middle_block.2.") for name in names))
    i = j = 0
    for position in _numbers(modules, "output_blocks."):
        sub = _numbers(modules, f"output_blocks.{position}.")
        up = next((k for k in sub if f"output_blocks.{position}.{k}.conv." in modules), None)
        _resnet(pairs, f"up_blocks.{i}.resnets.{j}", f"output_blocks.{position}.0")
        if 1 in sub and up != 1:
            pairs[f"up_blocks.{i}.attentions.{j}"] = f"output_blocks.{position}.1"
        j += 1
        if up is not None:
            pairs[f"up_blocks.{i}.upsamplers.0.conv"] = f"output_blocks.{position}.{up}.conv"
            i, j = i + 1, 0
    return pairs


def _middle(pairs: dict[str, str], attention: bool) -> None:
    """Return the rules of the middle block; without attention (distilled SDXL) the second resnet follows the first."""
    _resnet(pairs, "mid_block.resnets.0", "middle_block.0")
    if attention:
        pairs["mid_block.attentions.0"] = "middle_block.1"
    _resnet(pairs, "mid_block.resnets.1", "middle_block.2" if attention else "middle_block.1")
