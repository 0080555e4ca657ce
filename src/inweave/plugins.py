"""Objects that other installed packages add to inweave, through entry points.

    [project.entry-points."inweave.families"]      in the pyproject.toml of the other package
    pixel-art = "pixel_art.inweave:PIXEL_ART"      name = "module:object"

Nothing is imported until `load_plugins` is called for a group, and each group is loaded once per process.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from inweave.errors import ConfigError


@cache
def load_plugins(group: str) -> dict[str, object]:
    """Return the objects of an entry-point group by the names of their entry points, sorted.

    Args:
        group: the group's name, for example ``"inweave.families"``.

    Returns:
        The loaded object of each entry point.

    Raises:
        ConfigError: one problem for each plugin that cannot be imported and for each name that two packages use.
    """
    plugins: dict[str, object] = {}
    packages: dict[str, str] = {}
    problems: list[str] = []
    for entry in sorted(entry_points(group=group), key=lambda each: (each.name, _package(each))):
        if entry.name in packages:
            pair = f"{packages[entry.name]} and {_package(entry)}"
            problems.append(
                f"plugin {entry.name!r} ({group}) is defined by two packages, {pair}; uninstall one of them"
            )
            continue
        packages[entry.name] = _package(entry)
        try:
            plugins[entry.name] = entry.load()
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            problems.append(
                f"plugin {entry.name!r} ({group}) of {_package(entry)} cannot be loaded from {entry.value}: {reason}; "
                "fix or uninstall that package"
            )
    if problems:
        raise ConfigError(problems)
    return plugins


def _package(entry: EntryPoint) -> str:
    """Return the name of the package that declares an entry point."""
    return entry.dist.name if entry.dist is not None else "an unnamed package"
