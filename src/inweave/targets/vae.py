"""The autoencoders of SD 1.x, 2.x, SDXL, SD3 and FLUX: diffusers <-> ldm names.

Both halves count their levels in the order data passes, except that ldm's decoder counts backwards:

    encoder.down_blocks.i.resnets.j            encoder.down.i.block.j
    encoder.down_blocks.i.downsamplers.0.conv  encoder.down.i.downsample.conv
    decoder.up_blocks.i.resnets.j              decoder.up.(n-1-i).block.j       n levels
    decoder.up_blocks.i.upsamplers.0.conv      decoder.up.(n-1-i).upsample.conv
    *.mid_block.resnets.0 / .1                 *.mid.block_1 / .block_2
    *.mid_block.attentions.0.to_q              *.mid.attn_1.q
    quant_conv, post_quant_conv, conv_in, conv_out have one name; in FLUX.2's, which has a batch norm `bn`, the
    originals are encoder.quant_conv and decoder.post_quant_conv

ldm's attention is made of 1x1 convolutions, [c, c, 1, 1]; the parts are linear layers, [c, c].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from inweave.targets.links import Link, Naming, Shape

_FIXED = {
    "mid_block.resnets.0": "mid.block_1", "mid_block.resnets.1": "mid.block_2", "mid_block.attentions.0": "mid.attn_1",
    "conv_norm_out": "norm_out", "conv_in": "conv_in", "conv_out": "conv_out",
}  # fmt: skip
_LEAVES = {
    "conv_shortcut": "nin_shortcut", "group_norm": "norm",
    "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out",
}  # fmt: skip
_QUANT = r"(?:post_)?quant_conv\."
_DIFFUSERS = re.compile(rf"{_QUANT}|(?:encoder|decoder)\.(?:(?:down|up)_blocks\.\d+\.|mid_block\.|conv_)")
_LDM = re.compile(
    rf"{_QUANT}|(?:encoder|decoder)\.(?:{_QUANT}|(?:down|up)\.\d+\.|mid\.(?:block|attn)_\d\.|norm_out\.|conv_)"
)


class VaeTable:
    name = "vae"
    divides = False

    def links(self, shapes: Mapping[str, Shape], naming: Naming) -> list[Link]:
        levels = _levels(shapes, naming)
        if naming == "diffusers":
            inside = {"quant_conv": "encoder.", "post_quant_conv": "decoder."} if "bn.running_mean" in shapes else {}
            return [
                Link(name, shape, inside.get(name.partition(".")[0], "") + _to_ldm(name, levels))
                for name, shape in shapes.items()
            ]
        links = []
        for name, shape in shapes.items():
            part = _to_diffusers(name, levels)
            linear = ".attentions." in part and shape[2:] == (1, 1)
            links.append(Link(part, shape[:2] if linear else shape, name))
        return links

    def coverage(self, names: Iterable[str]) -> dict[Naming, int]:
        names = list(names)
        return {
            "diffusers": sum(1 for name in names if _DIFFUSERS.match(name)),
            "original": sum(1 for name in names if _LDM.match(name)),
        }

    def aliases(self, links: list[Link]) -> dict[str, tuple[str, ...]]:
        return {}


def _levels(names: Iterable[str], naming: Naming) -> int:
    """Return the number of the decoder's levels: its last one in the one naming is the first in the other."""
    level = re.compile(r"decoder\.up_blocks\.(\d+)\." if naming == "diffusers" else r"decoder\.up\.(\d+)\.")
    return 1 + max((int(match[1]) for name in names if (match := level.match(name))), default=-1)


def _to_ldm(name: str, levels: int) -> str:
    half, _, rest = name.partition(".")
    if half not in ("encoder", "decoder"):
        return name
    if match := re.match(r"(down|up)_blocks\.(\d+)\.(resnets\.(\d+)|(?:down|up)samplers\.0)\.(.+)", rest):
        way, level, kind, block, leaf = match.groups()
        number = int(level) if way == "down" else levels - 1 - int(level)
        inside = f"block.{block}" if kind.startswith("resnets") else f"{way}sample"
        return f"{half}.{way}.{number}.{inside}.{_swapped(leaf, _LEAVES)}"
    for part, ldm in _FIXED.items():
        if rest.startswith(f"{part}."):
            return f"{half}.{ldm}.{_swapped(rest[len(part) + 1 :], _LEAVES)}"
    return name


def _to_diffusers(name: str, levels: int) -> str:
    half, _, rest = name.partition(".")
    if half not in ("encoder", "decoder"):
        return name
    if re.match(_QUANT, rest):
        return rest
    leaves = {ldm: part for part, ldm in _LEAVES.items()}
    if match := re.match(r"(down|up)\.(\d+)\.(block\.(\d+)|(?:down|up)sample)\.(.+)", rest):
        way, level, kind, block, leaf = match.groups()
        number = int(level) if way == "down" else levels - 1 - int(level)
        inside = f"resnets.{block}" if kind.startswith("block") else f"{way}samplers.0"
        return f"{half}.{way}_blocks.{number}.{inside}.{_swapped(leaf, leaves)}"
    for part, ldm in _FIXED.items():
        if rest.startswith(f"{ldm}."):
            return f"{half}.{part}.{_swapped(rest[len(ldm) + 1 :], leaves)}"
    return name


def _swapped(leaf: str, names: Mapping[str, str]) -> str:
    """Map `to_out.0.weight` to `proj_out.weight`: the module's name in the other naming, the same parameter."""
    module, _, param = leaf.rpartition(".")
    return f"{names.get(module, module)}.{param}" if module else leaf
