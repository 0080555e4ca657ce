"""A model as a set of names: its tensors, and the spellings under which an adapter may name them.

    Component = one network (the denoiser "unet", text encoders "te1" "te2" "te3", or any other "model")
      parts     the finest tensors, by diffusers/transformers name
      homes     the place of each part in the given files: (tensor, rows, swap, transpose)
      spellings module name -> param -> the parts it covers, for both namings and their aliases

So the same adapter resolves against a diffusers folder and a single-file checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from inweave.targets.links import Link, Naming, Shape, Table, tiles_of, whole_shape
from inweave.targets.spellings import alternatives, fused_leaves
from inweave.targets.tables import OWN, SPELLINGS, TABLES

DENOISER_TABLES = tuple(name for name in TABLES if name not in ("openclip", "vae", "causal-vae", "own"))

#: prefixes of single-file checkpoints: (prefix, component)
SINGLE_FILE_PREFIXES: tuple[tuple[str, str], ...] = (
    ("model.diffusion_model.", "unet"),
    ("diffusion_model.", "unet"),
    ("cond_stage_model.transformer.", "te1"),
    ("cond_stage_model.model.", "te1"),
    ("conditioner.embedders.0.transformer.", "te1"),
    ("conditioner.embedders.0.model.", "te1"),
    ("conditioner.embedders.1.model.", "te2"),
    ("text_encoders.clip_l.transformer.", "te1"),
    ("text_encoders.clip_g.transformer.", "te2"),
    ("text_encoders.t5xxl.transformer.", "te3"),
    ("text_encoders.qwen3_4b.transformer.", "te1"),
    ("text_encoders.qwen25_7b.transformer.", "te1"),
    ("first_stage_model.", "vae"),
    ("vae.", "vae"),
    ("model_ema.", "ema"),
)


#: tensors that accompany a quantized weight
QUANTIZATION = (
    ".scale_weight",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".scale_input",
    ".input_scale",
    ".comfy_quant",
    "scaled_fp8",
)


@dataclass(frozen=True, slots=True)
class Home:
    """The place of a part in the given files; ``length`` None means the whole tensor."""

    tensor: str
    start: int = 0
    length: int | None = None
    swap: bool = False
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """One part covered by a module name, and how its rows differ from those in that naming."""

    part: str
    swap: bool = False
    transpose: bool = False


Spelling = Mapping[str, tuple[Use, ...]]


@dataclass(frozen=True)
class Component:
    """``shapes`` are tensors in the ``listed`` naming; ``naming`` is that of the given files.

    Everything else is computed on first use, so that using one naming never pays for the other.
    """

    name: str
    table: Table
    naming: Naming
    shapes: Mapping[str, Shape]
    listed: Naming = "diffusers"
    prefix: str = ""
    missing: frozenset[str] = frozenset()  # parts that files in this naming lack
    #: tensor -> whether it is stored as (in, out), where the modules of a live model tell; shapes do not, if square
    layouts: Mapping[str, bool] = field(default_factory=dict)

    @cached_property
    def links(self) -> list[Link]:
        return self.table.links(self.shapes, self.listed)

    @cached_property
    def parts(self) -> Mapping[str, Shape]:
        if self.listed == "diffusers" and not self.table.divides:
            return self.shapes
        return {link.part: link.shape for link in self.links}

    @cached_property
    def link_of(self) -> dict[str, Link]:
        return {link.part: link for link in self.links}

    @cached_property
    def tiles(self) -> dict[str, list[Link]]:
        """original tensor -> the parts that make it up, in row order."""
        return tiles_of(self.links)

    @cached_property
    def divided(self) -> dict[str, list[Link]]:
        """diffusers tensor -> its parts in row order, for those that consist of several."""
        divided: dict[str, list[Link]] = {}
        for link in self.links if self.table.divides else ():
            if link.tensor:
                divided.setdefault(link.tensor, []).append(link)
        for links in divided.values():
            links.sort(key=lambda link: link.offset)
        return divided

    @cached_property
    def further_tiles(self) -> list[dict[str, list[Link]]]:
        """The tiles of every further original spelling of the same model."""
        return [self.spelled_by(name).tiles for name in SPELLINGS.get(self.table.name, ())]

    def spelled_by(self, table: str) -> Component:
        """Return the same network with the original names of another table."""
        return replace(self, table=TABLES[table], shapes=self.diffusers, listed="diffusers")

    @cached_property
    def diffusers(self) -> Mapping[str, Shape]:
        """The network's tensors and their shapes in diffusers naming, whatever the files at hand."""
        if self.listed == "diffusers":
            return self.shapes
        return {link.diffusers: whole_shape(link, self.divided) for link in self.links}

    @cached_property
    def fused(self) -> dict[tuple[str, ...], str]:
        """The parts of every tensor that consists of several, in any naming -> that tensor."""
        every = (self.divided, *self.further_tiles, self.tiles)
        return {
            tuple(k.part for k in links): name for tiles in every for name, links in tiles.items() if len(links) > 1
        }

    @cached_property
    def homes(self) -> dict[str, Home]:
        present = (link for link in self.links if link.part not in self.missing)
        if self.naming == "diffusers":
            return {
                link.part: Home(self.prefix + link.diffusers, link.offset, link.rows if link.tensor else None)
                for link in present
            }
        return {
            link.part: Home(self.prefix + link.original, link.start, link.length, link.swap, link.transpose)
            for link in present
        }

    @cached_property
    def tensors(self) -> dict[str, Shape]:
        """The files' own tensors with their shapes."""
        tensors: dict[str, Shape] = {}
        for link in self.links:
            if link.part in self.missing:
                continue
            if self.naming == "diffusers":
                tensors[self.prefix + link.diffusers] = whole_shape(link, self.divided)
            else:
                name = self.prefix + link.original
                rows = tensors.get(name, (0,))[0] if link.length is not None else 0
                shape = link.shape[::-1] if link.transpose else link.shape
                if link.flat:
                    shape = (math.prod(shape),)
                tensors[name] = (rows + shape[0], *shape[1:]) if shape else ()
        return tensors

    @cached_property
    def by_diffusers(self) -> dict[str, Spelling]:
        modules: dict[str, dict[str, tuple[Use, ...]]] = {}
        for part in self.parts:
            module, param = module_of(part)
            modules.setdefault(module, {})[param] = (Use(part),)
        for tensor, links in self.divided.items():
            module, param = module_of(tensor)
            modules.setdefault(module, {})[param] = tuple(Use(link.part) for link in links)
        return _with_roots(modules)

    @cached_property
    def by_original(self) -> dict[str, Spelling]:
        modules: dict[str, dict[str, tuple[Use, ...]]] = {}
        for tiles in (self.tiles, *self.further_tiles):
            for original, links in tiles.items():
                module, param = module_of(original)
                uses = tuple(Use(k.part, k.swap, k.transpose) for k in links)
                modules.setdefault(module, {}).setdefault(param, uses)
                if len(uses) > 1:
                    for number, use in enumerate(uses):
                        modules.setdefault(f"{module}.{number}", {}).setdefault(param, (use,))
                if len(uses) == 4 and module.endswith("linear1"):  # attention and MLP input in one linear
                    modules.setdefault(f"{module}_qkv", {}).setdefault(param, uses[:3])
                    modules.setdefault(f"{module}_mlp", {}).setdefault(param, uses[3:])
        for alias, parts in self.table.aliases(self.links).items():
            for param in ("weight", "bias"):
                if all(f"{part}.{param}" in self.parts for part in parts):
                    modules.setdefault(alias, {})[param] = tuple(Use(f"{part}.{param}") for part in parts)
        return _with_roots(modules)

    @cached_property
    def _flat_diffusers(self) -> dict[str, str]:
        return _flattened(self.by_diffusers)

    @cached_property
    def _flat_original(self) -> dict[str, str]:
        return _flattened(self.by_original)

    def look_up(self, name: str, *, flat: bool, prefer: Naming = "diffusers") -> tuple[Spelling, str] | None:
        """Return what a module name covers and in which naming; ``prefer`` decides if the two disagree."""
        order = ("diffusers", "original") if prefer == "diffusers" else ("original", "diffusers")
        readings = self.readings_of(name, flat=flat)
        return next(((readings[naming], naming) for naming in order if naming in readings), None)

    def readings_of(
        self, name: str, *, flat: bool, namings: tuple[Naming, ...] = ("diffusers", "original")
    ) -> dict[str, Spelling]:
        """Return the readings of a module name, by naming.

        In a model known by its own names only, a path may have extra leading segments (`distilbert.`); in the
        others only the roots of known wrappers are ignored (`inweave.targets.spellings`): an unknown root belongs to
        another network.
        """
        any_root = self.table.name == "own"
        for spelled in (name, *alternatives(name, flat=flat, any_root=any_root)):
            readings: dict[str, Spelling] = {}
            for naming in namings:
                spelling = self._reading_in(spelled, flat, naming) or self._fused_reading(spelled, flat, naming)
                if spelling is not None:
                    readings[naming] = spelling
            if readings:
                return readings
        return {}

    def _fused_reading(self, name: str, flat: bool, naming: Naming) -> Spelling | None:
        """Return the reading of a projection that stacks several of the finer names, such as `to_qkv`."""
        leaves = fused_leaves(name) if naming == "diffusers" else ()
        readings = [spelling for leaf in leaves if (spelling := self._reading_in(leaf, flat, naming)) is not None]
        return stacked(readings, self.parts) if leaves and len(readings) == len(leaves) else None

    def _reading_in(self, name: str, flat: bool, naming: Naming) -> Spelling | None:
        table = self.by_diffusers if naming == "diffusers" else self.by_original
        if not flat and name in table:
            return table[name]
        flats = self._flat_diffusers if naming == "diffusers" else self._flat_original
        module = flats.get(name.replace(".", "_"))
        return table[module] if module is not None else None

    def modules(self) -> Iterable[str]:
        """Return every module name of either naming."""
        return dict.fromkeys((*self.by_diffusers, *self.by_original))


@dataclass(frozen=True, repr=False)
class ModelIndex:
    """The names and shapes of a model's tensors by component, on which adapters are resolved.

    `index_of` makes one from a model, a file or a known name. ``base`` is the name of the base model, if it is known;
    ``in_order``: the tensors are in the order in which a live model has them, which files do not keep.
    """

    components: Mapping[str, Component]
    base: str | None = None
    source: str = ""
    in_order: bool = False

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} with {len(component.parts)} tensors" for name, component in self.components.items())
        return f"<ModelIndex: {self.base or self.source or 'a model'}: {sizes}>"

    @property
    def denoiser(self) -> Component | None:
        """The UNet or transformer, if there is one."""
        return self.components.get("unet")

    @property
    def encoders(self) -> list[Component]:
        """The text encoders."""
        return [c for name, c in self.components.items() if name.startswith("te")]

    @property
    def naming(self) -> str:
        """How its tensors are named: "diffusers" or "original"."""
        first = self.denoiser or next(iter(self.components.values()))
        return first.naming

    def __iter__(self) -> Iterator[Component]:
        return iter(self.components.values())


def module_of(tensor: str) -> tuple[str, str]:
    """Return (module, param) of a tensor name; a bare parameter is its own module's weight."""
    head, _, leaf = tensor.rpartition(".")
    if head and leaf in ("weight", "bias", "scale"):
        return head, leaf
    for param in ("weight", "bias"):
        if leaf.endswith(f"_{param}"):
            return tensor[: -len(param) - 1], param
    return tensor, "weight"


def component_from_names(name: str, shapes: Mapping[str, Shape], prefix: str = "") -> Component:
    """Identify the family of a network from its tensor names and index it."""
    table, naming = identify(shapes)
    return Component(name, table, naming, shapes, naming, prefix)


def identify(names: Iterable[str]) -> tuple[Table, Naming]:
    """Return the table that knows the most of these names, if it knows four fifths of them."""
    names = list(names)
    best: tuple[int, Table, Naming] = (0, OWN, "diffusers")
    for table in TABLES.values():
        for naming, count in table.coverage(names).items():
            if count > best[0]:
                best = (count, table, naming)
    count, table, naming = best
    return (table, naming) if count >= 0.8 * len(names) else (OWN, "diffusers")


def index_from_names(shapes: Mapping[str, Shape], *, source: str = "", base: str | None = None) -> ModelIndex:
    """Index a checkpoint, whatever it holds: a single file, one network, or any other torch model."""
    grouped: dict[tuple[str, str], dict[str, Shape]] = {}
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(QUANTIZATION)}
    for name, shape in shapes.items():
        prefix, component = next(((p, c) for p, c in SINGLE_FILE_PREFIXES if name.startswith(p)), ("", ""))
        grouped.setdefault((component, prefix), {})[name[len(prefix) :]] = shape
    bare = grouped.pop(("", ""), {})
    components: dict[str, Component] = {}
    for (component, prefix), names in grouped.items():
        if component in ("ema", "vae") or (component == "unet" and component in components):
            continue
        components[component] = component_from_names(component, names, prefix)
    if bare and (not components or len(bare) > len(shapes) // 2):
        only = component_from_names("model", bare)
        name = _role(only, bare)
        components[name] = replace(only, name=name)
    return ModelIndex(components, base, source)


def _role(component: Component, names: Mapping[str, Shape]) -> str:
    if component.table.name in DENOISER_TABLES:
        return "unet"
    if component.table.name == "openclip" or any(n.startswith("text_model.encoder.") for n in names):
        return "te1"
    if any(n.startswith("encoder.block.") for n in names) and not any(n.startswith("decoder.") for n in names):
        return "te3"
    return "model"


def _with_roots(modules: dict[str, dict[str, tuple[Use, ...]]]) -> dict[str, Spelling]:
    """Also accept names without the root most modules share (`text_model.`, `transformer.`, `model.`)."""
    spellings: dict[str, Spelling] = dict(modules)
    roots: dict[str, int] = {}
    for module in modules:
        root = module.partition(".")[0]
        roots[root] = roots.get(root, 0) + 1
    root, count = max(roots.items(), key=lambda item: item[1], default=("", 0))
    if count * 2 > len(modules) and not root.endswith(("blocks", "layers", "h", "block")):
        for module in list(modules):
            head, _, tail = module.partition(".")
            if head == root and tail:
                spellings.setdefault(tail, modules[module])
    return spellings


def stacked(readings: Sequence[Spelling], parts: Mapping[str, Shape]) -> Spelling | None:
    """Return several modules as one that stacks their rows, or None if their inputs differ."""
    spelling: dict[str, tuple[Use, ...]] = {}
    for param in ("weight", "bias"):
        uses = [reading[param] for reading in readings if param in reading]
        inputs = {parts[use.part][1:] for each in uses for use in each}
        if len(uses) == len(readings) and len(inputs) == 1:
            spelling[param] = tuple(use for each in uses for use in each)
    return spelling if "weight" in spelling else None


def _flattened(spellings: Mapping[str, Spelling]) -> dict[str, str]:
    """Map flat names to modules; two different modules with one flat name are left out, so they never match."""
    flats: dict[str, str] = {}
    clashes: set[str] = set()
    for module, spelling in spellings.items():
        flat = module.replace(".", "_")
        if flat in flats and spellings[flats[flat]] != spelling:
            clashes.add(flat)
        flats.setdefault(flat, module)
    for flat in clashes:
        del flats[flat]
    return flats
