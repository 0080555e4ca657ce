"""Which variant a single-file checkpoint holds, from its tensors' names and shapes, and why.

    names ──name table──► families that share it ──identify──► base ──its listing──► verified ──metadata──► variant

Each family knows which tensors decide (`Family.identify`). Then every tensor of the denoiser is compared with the
listing of that base, so a related model of another shape is refused here instead of being built wrongly. What tensors
cannot tell (velocity or noise in SD 2.x, Turbo or not) comes from marks and metadata in the file (`Family.refine`);
where those are silent, the evidence names what was assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inweave.adapter.components import FOLDERS
from inweave.errors import FormatError
from inweave.models.families import families
from inweave.models.families.base import ENCODERS, Family, Variant
from inweave.targets import bases
from inweave.targets.catalog import OUTSIDE_LISTINGS
from inweave.targets.index import DENOISER_TABLES, QUANTIZATION, SINGLE_FILE_PREFIXES
from inweave.targets.index import identify as table_of
from inweave.targets.links import Shape
from inweave.targets.tables import OWN

_ENCODER_FOLDERS = {FOLDERS[folder]: folder for folder in ENCODERS}


@dataclass(frozen=True, slots=True)
class Identification:
    """``parts``: folder of a diffusers model -> prefix of its tensors in this file."""

    variant: Variant
    parts: Mapping[str, str]
    evidence: tuple[str, ...]


def identify(shapes: Mapping[str, Shape], metadata: Mapping[str, str]) -> Identification:
    """Return the variant in a checkpoint of these tensors; raise FormatError if inweave cannot build it."""
    prefix, table, tensors = _denoiser(shapes)
    family, base, evidence = _family(table, tensors)
    evidence += _verify(family.variant(base).tensors, tensors)
    variant, remarks = family.refine(family.variant(base), shapes, metadata)
    parts = {family.networks[0].folder: prefix, **_other_parts(variant, shapes)}
    return Identification(variant, parts, (*evidence, *remarks))


def _family(table: str, tensors: Mapping[str, Shape]) -> tuple[Family, str, list[str]]:
    for family in (each for each in families() if each.table == table):
        if (identified := family.identify(tensors)) is not None:
            return family, *identified
    raise FormatError(f"a diffusion model of the family {table} that is none of the known ones: {_supported()}")


def _supported() -> str:
    return " or ".join(", ".join(dict.fromkeys(family.single_file for family in families())).rsplit(", ", 1))


def _denoiser(shapes: Mapping[str, Shape]) -> tuple[str, str, dict[str, Shape]]:
    """Return (prefix, table, tensors) of the diffusion model: under a prefix, or the whole file."""
    prefixes = tuple(prefix for prefix, _ in SINGLE_FILE_PREFIXES)
    bare = {name: shape for name, shape in shapes.items() if not name.startswith(prefixes)}
    candidates = [
        (prefix, {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)})
        for prefix, component in SINGLE_FILE_PREFIXES
        if component == "unet"
    ]
    tables = {family.table for family in families()} - {OWN.name}
    for prefix, tensors in (*candidates, ("", bare)):
        table, naming = table_of(name for name in tensors if not name.endswith(QUANTIZATION))
        if table.name == OWN.name and any(
            family.identify(tensors) for family in families() if family.table == OWN.name
        ):
            return prefix, table.name, tensors
        if table.name in tables and tensors:
            if naming == "diffusers":
                raise FormatError(
                    f"this is one network in diffusers names ({table.name}), not a single-file checkpoint; "
                    "give the diffusers folder it belongs to"
                )
            return prefix, table.name, tensors
        if table.name in DENOISER_TABLES and tensors:
            raise FormatError(
                f"a diffusion model of the family {table.name}; single files can be built of {_supported()}"
            )
    first = ", ".join(list(shapes)[:3]) or "nothing"
    raise FormatError(
        f"no diffusion model found: looked for {_supported()}, under {prefixes[0]} or {prefixes[1]} or without a "
        f"prefix; the file has {len(shapes):,} tensors: {first} ..."
    )


def _verify(base: str, tensors: Mapping[str, Shape]) -> list[str]:
    """Compare with the listing of the base; return a remark on tensors the base does not have.

    A base of another package may have no listing: its network is built from the configuration and names what is
    missing.
    """
    if bases.find(base) is None:
        return []
    index = bases.known_index(base, "original")
    denoiser = index.components["unet"]
    listed = {name[len(denoiser.prefix) :]: shape for name, shape in denoiser.tensors.items()}
    missing = [name for name in listed if name not in tensors]
    differing = [name for name in listed if name in tensors and _plain(tensors[name]) != _plain(listed[name])]
    if missing or differing:
        first = (
            missing[0] if missing else f"{differing[0]} {list(tensors[differing[0]])}, not {list(listed[differing[0]])}"
        )
        raise FormatError(
            f"close to {base}, but {len(missing)} of its {len(listed):,} tensors are missing and {len(differing)} have "
            f"another shape (first: {first}); a pruned, distilled or packed model cannot be built as {base}"
        )
    extra = [name for name in tensors if name not in listed and not name.endswith(QUANTIZATION)]
    remark = f"{len(extra)} tensors {base} does not have, such as {extra[0]}" if extra else ""
    return [f"all {len(listed):,} tensors of the denoiser are there", *([remark] if remark else [])]


def _plain(shape: Shape) -> Shape:
    """Return the shape without a 1x1 kernel: such a convolution and a linear layer hold the same numbers."""
    return shape[:2] if shape[2:] == (1, 1) else shape


def _other_parts(variant: Variant, shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Return folder -> prefix of the autoencoder and the text encoders the file has."""
    known = bases.find(variant.tensors)
    listed = known is not None and known.name not in OUTSIDE_LISTINGS  # of others only the denoiser
    encoders = [(part.prefix, part.component) for part in known.parts[1:]] if known and listed else SINGLE_FILE_PREFIXES
    prefixes = [(prefix, "vae") for prefix, component in SINGLE_FILE_PREFIXES if component == "vae"]
    prefixes += [
        (prefix, _ENCODER_FOLDERS[component]) for prefix, component in encoders if component in _ENCODER_FOLDERS
    ]
    parts: dict[str, str] = {}
    for prefix, folder in prefixes:
        if folder not in parts and any(name.startswith(prefix) for name in shapes):
            parts[folder] = prefix
    return parts
