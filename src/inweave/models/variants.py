"""The published diffusion models inweave can build, by any name in use.

Each is declared by its family (`inweave.models.families`); here they are found by name, repository, alias, or any name
of the base whose tensors they have.
"""

from __future__ import annotations

from functools import cache

from inweave.models.families import families
from inweave.models.families.base import Variant
from inweave.targets.bases import find


def variants() -> tuple[Variant, ...]:
    """Return the variants of all families."""
    return tuple(variant for family in families() for variant in family.variants)


@cache
def variants_by_name() -> dict[str, Variant]:
    """Return the variants by every name they are known by, in lower case."""
    return {
        label.lower(): variant
        for variant in reversed(variants())
        for label in (variant.name, variant.repo, variant.repo.rpartition("/")[2], *variant.aliases)
    }


def most_references(pipeline: str, *names: str | None) -> int:
    """Return how many reference images a model reads, known by its pipeline's class and by names of it."""
    own = [each for each in variants() if each.pipeline and each.pipeline == pipeline]
    own += [each for name in names if name and (each := find_variant(name)) is not None]
    families_of = [family for family in families() if family.pipeline == pipeline]
    counts = [each.references for each in own] + [family.references for family in families_of]
    if own and own[0].references is None:
        return next(family.references for family in families() if family.name == own[0].family)
    return next((count for count in counts if count is not None), 0)


def find_variant(text: str) -> Variant | None:
    """Return a variant by its name, repository or alias, or by any name of the base with its tensors."""
    label = text.strip().lower()
    plain = label.replace("_", "-").replace(" ", "-")
    known = variants_by_name()
    variant = known.get(label) or known.get(plain) or known.get(plain.rpartition("/")[2])
    if variant is not None:
        return variant
    base = find(text)
    return known.get(base.name) if base is not None else None
