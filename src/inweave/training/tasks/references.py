"""The references of a run: the size of each, and why a model cannot be trained on them; no weights are needed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from inweave.errors import amount
from inweave.files.paths import printable_path
from inweave.models.families.base import Tensors
from inweave.models.families.references import ReferenceFit
from inweave.models.model import Model
from inweave.training.config.schema import TrainConfig
from inweave.training.data.images import open_reference
from inweave.training.data.types import Example, subset_defaults, with_defaults
from inweave.training.tasks.diffusion_data import bucket_rules

Fits = tuple[ReferenceFit, ...]


def reference_fits(model: Model, config: TrainConfig, examples: Sequence[Example]) -> list[Fits]:
    """Return how the references of every example are resized and cut: to the area of the images they belong to."""
    family, rules, own = model.family, bucket_rules(config, model), config.reference_resolution
    fits: dict[tuple[tuple[int, int], int], ReferenceFit] = {}
    rows: list[Fits] = []
    for example in examples:
        area = own * own if own else prod(example.subset.resolution or rules.size)
        for reference in example.references:
            if (reference.size, area) not in fits:
                fits[reference.size, area] = family.reference_fit(model, reference.size, area)
        rows.append(tuple(fits[reference.size, area] for reference in example.references))
    return rows


def batch_shapes(model: Model, config: TrainConfig, examples: Sequence[Example]) -> list[tuple[tuple[int, int], ...]]:
    """Return the sizes of the references of every example, which are equal in a batch; nothing without references."""
    if not any(example.references for example in examples):
        return []
    return [tuple(fit.size for fit in fits) for fits in reference_fits(model, config, examples)]


def seen_captions(model: Model, captions: Sequence[list[str]], examples: Sequence[Example]) -> list[list[str]]:
    """Return the captions of every example as a text encoder reads them that sees its references too."""
    if not model.family.sees_references:
        return list(captions)
    rows = zip(captions, examples, strict=True)
    return [[seen_caption(model, text, example) for text in texts] for texts, example in rows]


def seen_caption(model: Model, text: str, example: Example) -> str:
    """Return a caption, which may be empty, with marks for the references of its image."""
    sizes = [reference.size for reference in example.references]
    pieces = model.family.seen_text(model, ((text, 1.0),) if text else (), sizes)
    return " ".join(piece for piece, _ in pieces)


def seen_images(model: Model, example: Example, *, flip: bool) -> Tensors:
    """Return what a text encoder sees of the references of an image, mirrored with it."""
    images = [open_reference(reference.path, flip=flip) for reference in example.references]
    return model.family.seen_images(model, images)


def reference_problems(model: Model, config: TrainConfig, examples: Sequence[Example]) -> list[str]:
    """Return what is wrong with the references of a dataset."""
    family, most = model.family, model.family.most_references(model.blueprint)
    name = model.blueprint.variant.name if model.blueprint.variant else family.name
    used = [example for example in examples if example.references]
    if used and not most:
        return [
            f"control: {name} is not an edit model, and {amount(len(used), 'image')} of the dataset have references, "
            f"the first being {printable_path(used[0].path)}; remove control, or train an edit model"
        ]
    problems = []
    if many := [example for example in used if len(example.references) > most]:
        problems.append(
            f"control: {printable_path(many[0].path)} has {amount(len(many[0].references), 'reference image')}, and "
            f"{name} reads {most} at most ({amount(len(many), 'image')} have more)"
        )
    without = [example for example in examples if not example.references]
    if family.needs_reference and without:
        problems.append(
            f"control: {name} edits images, and {printable_path(without[0].path)} has no reference image "
            f'({len(without)} of {amount(len(examples), "image")}); name their folders: control = ["before/"]'
        )
    wrong = [
        f"{printable_path(reference.path)}: {text}"
        for example in used
        for reference in example.references
        if (text := family.reference_problem(reference.size))
    ]
    if wrong:
        problems.append(f"control: {amount(len(wrong), 'reference image')} cannot be used: {'; '.join(wrong[:5])}")
    crops = [each for each in used if with_defaults(each.subset, subset_defaults(config)).random_crop]
    if crops:
        problems.append(
            f"crop: a random crop moves {printable_path(crops[0].path)} against its references, which stay whole; set "
            'crop = "center"'
        )
    return problems
