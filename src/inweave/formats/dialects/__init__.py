"""All dialects by name. To add one, write its file in this folder and list it here.

    inweave.formats.dialects.<name>      one subclass of `Dialect` and its instance, DIALECT
    another package                      an instance, through the entry points `inweave.dialects`

The dialect of a file is only a label for reports: nothing downstream depends on it. Other packages are loaded only when
a prefix or a name is unknown to the built-in dialects.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Literal, get_args

from inweave.errors import ConfigError

if TYPE_CHECKING:
    from inweave.formats.dialects.base import Dialect

GROUP = "inweave.dialects"

#: dialects that are written, in the order in which they are offered; other packages may add some
DialectName = Literal["kohya", "diffusers", "peft", "comfy", "onetrainer", "bfl", "candle"]
WRITTEN: tuple[str, ...] = get_args(DialectName)
#: read-only dialects; those with unique suffixes come first
READ = ("cloneofsimo", "xlabs", "hcp", "lycoris", "diffsynth")

_outside: dict[str, Dialect] = {}


@cache
def _built_in() -> tuple[Dialect, ...]:
    return tuple(import_module(f"{__name__}.{name}").DIALECT for name in (*READ, *WRITTEN))


def dialects() -> tuple[Dialect, ...]:
    """Return the built-in dialects and those that were registered."""
    return (*_built_in(), *_outside.values())


def register_dialect(dialect: Dialect) -> Dialect:
    """Add a dialect, and return it.

    Args:
        dialect: an instance of a subclass of `Dialect` with a unique ``name``.

    Raises:
        ConfigError: it is not such an object, or another dialect has its name or one of its prefixes.
    """
    from inweave.formats.dialects.base import Dialect

    if not isinstance(dialect, Dialect) or not getattr(dialect, "name", ""):
        raise ConfigError(
            f"{dialect!r} is not a dialect: an instance of inweave.formats.dialects.base.Dialect with a name"
        )
    prefixes = {prefix for prefix, _ in (*dialect.flat_prefixes, *dialect.dotted_prefixes)}
    for other in dialects():
        if other is not dialect and other.name == dialect.name:
            raise ConfigError(f"dialect {dialect.name!r}: another dialect has this name")
        clash = prefixes & {prefix for prefix, _ in (*other.flat_prefixes, *other.dotted_prefixes)}
        if other is not dialect and clash:
            raise ConfigError(f"dialect {dialect.name!r}: the prefix {min(clash)!r} belongs to {other.name!r}")
    _outside[dialect.name] = dialect
    _label.cache_clear()
    return dialect


@cache
def load_dialects() -> bool:
    """Register the dialects of other packages, once; return whether there are any."""
    from inweave.plugins import load_plugins

    plugins = load_plugins(GROUP)
    for name, dialect in plugins.items():
        try:
            register_dialect(dialect)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(f"plugin {name!r} ({GROUP}): {error}") from None
    return bool(plugins)


def written_dialects() -> list[str]:
    """Return the names of all dialects that can be written, other packages' included."""
    load_dialects()
    return [*WRITTEN, *(name for name, dialect in _outside.items() if dialect.form is not None)]


def dialect_named(name: str) -> Dialect:
    """Return a dialect that can be written.

    Raises:
        ConfigError: no dialect has this name.
    """
    if name not in WRITTEN:
        load_dialects()
    for dialect in dialects():
        if dialect.name == name and dialect.form is not None:
            return dialect
    raise ConfigError(f"no dialect is called {name!r}; known are {', '.join(written_dialects())}")


def dialect_of(prefix: str, families: Iterable[str], name: str, has_adapter_name: bool) -> str:
    """Return the name of a module's dialect for reports, from the dialect of its prefix and its suffixes' families."""
    return _label(prefix, frozenset(families), name.partition(".")[0], has_adapter_name)


@cache
def _label(prefix: str, families: frozenset[str], root: str, has_adapter_name: bool) -> str:
    from inweave.formats.dialects.base import ModuleKeys

    keys = ModuleKeys(prefix, families, root, has_adapter_name)
    if label := next(filter(None, (dialect.claims(keys) for dialect in dialects())), ""):
        return label
    if "dotted" in families or "peft" in families:
        return "diffusers" if "dotted" in families else "diffusers-peft"
    return "bare"
