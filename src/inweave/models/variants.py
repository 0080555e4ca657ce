"""The published diffusion models inweave can build, by any name in use.

Each is declared by its family (`inweave.models.families`); here they are found by name, repository, alias, or any name of
the base whose tensors they have.
"""

from __future__ import annotations

from inweave.models.families import FAMILIES
from inweave.models.families.base import Variant
from inweave.targets.bases import find

VARIANTS: tuple[Variant, ...] = tuple(variant for family in FAMILIES for variant in family.variants)

_BY_NAME = {
    label.lower(): variant
    for variant in reversed(VARIANTS)
    for label in (variant.name, variant.repo, variant.repo.rpartition("/")[2], *variant.aliases)
}


def known_names() -> tuple[str, ...]:
    """All names that variants are known by."""
    return tuple(_BY_NAME)


def find_variant(text: str) -> Variant | None:
    """A variant by its name, the name of its repository, an alias, or any name of the base it has the tensors of."""
    label = text.strip().lower()
    plain = label.replace("_", "-").replace(" ", "-")
    variant = _BY_NAME.get(label) or _BY_NAME.get(plain) or _BY_NAME.get(plain.rpartition("/")[2])
    if variant is not None:
        return variant
    base = find(text)
    return _BY_NAME.get(base.name) if base is not None else None
