"""Entry points of other packages: loaded once, refused by name when broken or when two share a name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from inweave.errors import ConfigError
from inweave.plugins import load_plugins

GROUP = "inweave.test-plugins"


def install(folder: Path, package: str, entries: dict[str, str], source: str = "") -> None:
    """Write a package with a dist-info folder, as pip would install it."""
    (folder / f"{package}.py").write_text(source, "utf-8")
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", "utf-8")
    lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    load_plugins.cache_clear()
    return tmp_path


def test_plugins_are_sorted_by_name_and_imported_once(site: Path) -> None:
    install(
        site, "several_plugins", {"z": "several_plugins:LAST", "a": "several_plugins:FIRST"}, "FIRST, LAST = [], {}"
    )
    loaded = load_plugins(GROUP)
    module = sys.modules["several_plugins"]
    assert list(loaded) == ["a", "z"]
    assert loaded["a"] is module.FIRST and loaded["z"] is module.LAST
    assert load_plugins(GROUP) is loaded


def test_a_group_without_plugins_is_empty(site: Path) -> None:
    assert load_plugins(GROUP) == {}


def test_every_broken_plugin_is_reported_by_name(site: Path) -> None:
    install(site, "broken_plugin", {"b": "broken_plugin:THING"}, "raise OSError('no such library\\nat all')")
    install(site, "lacking_plugin", {"l": "lacking_plugin:THING"})
    install(site, "exiting_plugin", {"e": "exiting_plugin"}, "raise SystemExit(3)")
    with pytest.raises(ConfigError) as caught:
        load_plugins(GROUP)
    broken, exiting, lacking = map(str, caught.value.problems)
    assert broken.startswith(
        "plugin 'b' (inweave.test-plugins) of broken_plugin cannot be loaded from broken_plugin:THING: "
        "OSError: no such library; "
    )
    assert "SystemExit: 3" in exiting
    assert "AttributeError" in lacking and "THING" in lacking


def test_a_name_that_two_packages_use_is_refused(site: Path) -> None:
    install(site, "one_plugin", {"same": "one_plugin"})
    install(site, "other_plugin", {"same": "other_plugin"})
    with pytest.raises(ConfigError, match=r"'same' .* is defined by two packages, one_plugin and other_plugin"):
        load_plugins(GROUP)
