"""The name tables of the known families: text files in `names/`, whose rules `inweave.targets.rules` defines.

    # ...                            a comment
    include FILE [OLD=NEW ...]       the rules of another file, with words replaced
    [@ blocks vace_blocks]           the rules below hold for each of these names in place of @ (- is the empty name)
    [rules]                          the end of such a section
    [aliases]                        `alias-module  original-module  [number of parts]`

A file whose name begins with _ is included by others. The tables of ``name-comfy`` are ComfyUI's spelling of the same
models: HunyuanVideo, FramePack, HunyuanImage and Ovis are spelled as Flux is there, and Stable Cascade keeps q, k and
v apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

from inweave.targets.causal_vae import CAUSAL_VAE
from inweave.targets.links import IdentityTable, Table
from inweave.targets.rules import RuleTable
from inweave.targets.unet import UnetTable
from inweave.targets.vae import VaeTable


def _sections(name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the sections of a file: ("rules" or "aliases", its lines), with everything included and repeated."""
    kind, names, lines = "rules", [""], list[str]()
    for line in resources.files(__package__).joinpath("names", f"{name}.txt").read_text("utf-8").splitlines():
        words = line.split()
        if not words or words[0] == "#":
            continue
        if words[0] == "include":
            for _, included in _sections(words[1]):
                lines += [_replaced(each, words[2:]) for each in included]
        elif line.startswith("["):
            yield kind, [each.replace("@", stack) for stack in names for each in lines]
            head, *stacks = line.strip("[]").split()
            kind, lines = "aliases" if head == "aliases" else "rules", []
            names = [stack.strip("-") for stack in stacks] or [""]
        else:
            lines.append(line)
    yield kind, [each.replace("@", stack) for stack in names for each in lines]


def _replaced(line: str, words: list[str]) -> str:
    for word in words:
        old, _, new = word.partition("=")
        line = line.replace(old, new)
    return line


def read_table(name: str) -> RuleTable:
    """Return the table in `names/`, parsed when first needed."""

    def text(section: str) -> str:
        return "\n".join(line for kind, lines in _sections(name) if kind == section for line in lines)

    return RuleTable(name, lambda: text("rules"), lambda: text("aliases"))


#: where an adapter fits several tables, the first one counts: HunyuanVideo's knows every name of HunyuanImage's refiner
_NAMES = (
    "flux", "longcat", "flux2", "sd3", "z-image", "lumina2", "wan", "ltx", "mochi",
    "hunyuan-image", "hunyuan-image-comfy",
    "hunyuan-video", "hunyuan-video-comfy", "hunyuan-video-1.5", "hunyuan-video-1.5-comfy", "ovis", "ovis-comfy",
    "pixart", "sana", "sana-video", "auraflow", "anima", "krea2", "minimax-h3", "ideogram4", "flux3",
    "cascade", "cascade-comfy", "openclip",
)  # fmt: skip
OWN = IdentityTable()
_TABLES: list[Table] = [UnetTable(), *map(read_table, _NAMES), VaeTable(), CAUSAL_VAE, OWN]
TABLES = {table.name: table for table in _TABLES}

#: table -> the tables of the other original spellings of the same models
SPELLINGS: dict[str, tuple[str, ...]] = {
    name: (other,)
    for own, comfy in ((table, f"{table}-comfy") for table in TABLES if f"{table}-comfy" in TABLES)
    for name, other in ((own, comfy), (comfy, own))
}
