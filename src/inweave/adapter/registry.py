"""All algorithms by name: the built-in ones, and those of other packages through the entry points `inweave.algorithms`.

    [project.entry-points."inweave.algorithms"]      in the pyproject.toml of the other package
    toy = "toy_lora:Toy"                             a subclass of `Factors`

Other packages are loaded only when a suffix, a prefix or a name is unknown to the built-in algorithms and dialects.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from inweave.adapter.experts import ExpertLora
from inweave.adapter.factors import Factors
from inweave.adapter.full import Full, TokenRows
from inweave.adapter.glora import Glora
from inweave.adapter.ia3 import Ia3
from inweave.adapter.loha import Loha
from inweave.adapter.lokr import Lokr
from inweave.adapter.lora import Lora
from inweave.adapter.oft import Boft, BoftIn, Oft, OftIn
from inweave.adapter.vera import Vera
from inweave.errors import ConfigError

GROUP = "inweave.algorithms"

#: kind -> class, in the order in which they are matched with a module's tensors
ALGORITHMS: dict[str, type[Factors]] = {}


def register_algorithm(algorithm: type[Factors]) -> type[Factors]:
    """Add an algorithm, and return it.

    Args:
        algorithm: a subclass of `Factors` with a unique ``kind``.

    Raises:
        ConfigError: it is not such a class, or its kind or one of its suffixes belongs to another algorithm.
    """
    if not (isinstance(algorithm, type) and issubclass(algorithm, Factors) and algorithm.kind):
        raise ConfigError(f"{algorithm!r} is not an algorithm: a subclass of inweave.adapter.Factors with a kind")
    if ALGORITHMS.get(algorithm.kind, algorithm) is not algorithm:
        raise ConfigError(
            f"algorithm {algorithm.kind!r}: {ALGORITHMS[algorithm.kind].__qualname__} has this name already"
        )
    own = {suffix for table in algorithm.suffixes.values() for suffix in table}
    for other in ALGORITHMS.values():
        if other is not algorithm and (clash := own & {s for table in other.suffixes.values() for s in table}):
            raise ConfigError(f"algorithm {algorithm.kind!r}: the suffix {min(clash)!r} belongs to {other.kind!r}")
    ALGORITHMS[algorithm.kind] = algorithm
    return algorithm


@cache
def load_algorithms() -> bool:
    """Register the algorithms of other packages, once; return whether there are any."""
    from inweave.plugins import load_plugins

    plugins = load_plugins(GROUP)
    for name, algorithm in plugins.items():
        try:
            register_algorithm(algorithm)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(f"plugin {name!r} ({GROUP}): {error}") from None
    return bool(plugins)


@cache
def imported(reference: str) -> Any:
    """Return the object that "module:name" refers to; the torch code of an algorithm is imported on first use."""
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{reference}: cannot be imported: {error}") from None


for each in (ExpertLora, Lora, Loha, Lokr, Glora, Oft, Boft, OftIn, BoftIn, Ia3, Vera, TokenRows, Full):
    register_algorithm(each)
