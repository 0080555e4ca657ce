"""Adapters on the Hugging Face hub: `owner/name`, or `owner/name/FILE` where a repository holds several files.

Files come from the hub's cache, and from the hub itself only if that is allowed. Only safetensors and
adapter_config.json are fetched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import TypeVar

from inweave.adapter import Adapter
from inweave.arguments import expect
from inweave.errors import ConfigError, FormatError, RequestError
from inweave.exchange.load import load as load_file
from inweave.files.paths import as_path, occupied
from inweave.formats.alphas import Alphas

_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w./ -]*))?")
_USUAL = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
_LISTED = 8
T = TypeVar("T")


def load(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    trainer_exact: bool = False,
    alpha: Alphas | None = None,
    allow_download: bool = False,
) -> Adapter:
    """Read an adapter in any dialect, from a file or from the Hugging Face hub.

    Args:
        path: a .safetensors file, an index of shards, a directory, or an adapter on the hub: "owner/name", or
            "owner/name/FILE" where it has several.
        name: the adapter to read if the keys carry several PEFT adapter names.
        trainer_exact: scale kohya `split_qkv` files as their trainer did, instead of as every loader does.
        alpha: the alpha of modules for which the file does not state one, as in a PEFT file without its
            adapter_config.json: a number, or {rank or pattern: number} with "*" for all others.
        allow_download: whether an adapter on the hub may be downloaded; without it only the hub's cache is used.

    Returns:
        The adapter; ``adapter.assumed_alphas`` names the modules for which alpha = rank is assumed.

    Raises:
        FormatError: the file cannot be read, or is not an adapter.
        ConfigError: ``alpha`` is invalid, or no module needs it; or the hub's repository has several adapters.
        RequestError: the hub refused a download, or could not be reached.
    """
    expect("allow_download", allow_download, bool)
    if isinstance(path, str) and not occupied(as_path(path)) and is_hub_id(path):
        local = hub_adapter(path, allow_download=allow_download)
        if local is None:
            raise FormatError(
                f"{path}: no such file or directory, and the hub's cache has no such adapter; "
                "load(..., allow_download=True) fetches it from the Hugging Face hub"
            )
        path = local
    return load_file(path, name=name, trainer_exact=trainer_exact, alpha=alpha)


def hub_adapter(text: str, *, allow_download: bool) -> Path | None:
    """Return the local file or folder of an adapter on the hub; None if it is not an id, or not cached.

    Raises:
        RequestError: downloading is allowed, and the hub cannot be reached or refuses.
        ConfigError: the repository has several adapters, or no such file.
    """
    match = _ID.fullmatch(text)
    if match is None or not is_hub_id(text):
        return None
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        return None
    repo, inside = match[1], (match[2] or "").rstrip("/")
    if allow_download:
        chosen = _chosen(repo, _request(repo, lambda: huggingface_hub.list_repo_files(repo)), inside)
        folder = _request(repo, lambda: huggingface_hub.snapshot_download(repo, allow_patterns=_patterns(chosen)))
        return Path(folder) / chosen
    try:
        folder = huggingface_hub.snapshot_download(repo, local_files_only=True, allow_patterns=["-"])  # parts will do
        names = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]
        chosen = _chosen(repo, names, inside)
        huggingface_hub.snapshot_download(repo, local_files_only=True, allow_patterns=_patterns(chosen))  # all of it
    except (OSError, ValueError):
        return None
    return Path(folder) / chosen


def _patterns(chosen: str) -> list[str]:
    """Return the files to fetch: a PEFT folder's are the weights and the configuration, which holds the scale."""
    prefix = "" if chosen == "." else f"{chosen}/"
    return [chosen] if chosen.endswith(".safetensors") else [prefix + _USUAL[0], prefix + "adapter_config.json"]


def is_hub_id(text: str) -> bool:
    """Return whether a text has the form of an adapter on the hub, and not that of a file's name."""
    match = _ID.fullmatch(text)
    return match is not None and ".." not in text and not (match[2] is None and text.endswith(".safetensors"))


def _chosen(repo: str, names: Iterable[str], inside: str) -> str:
    """Return the file or the folder of the adapter, relative to the repository."""
    files = sorted(name for name in names if name.endswith(".safetensors"))
    if inside in files:
        return inside
    here = [name for name in files if PurePosixPath(name).parent.as_posix() == (inside or ".")]
    for usual in _USUAL:
        path = (PurePosixPath(inside) / usual).as_posix()
        if path in here:
            folder = PurePosixPath(path).parent.as_posix()
            return folder if usual == _USUAL[0] else path
    if len(here) == 1:
        return here[0]
    listed = ", ".join(f"{repo}/{name}" for name in (here or files)[:_LISTED])
    what = f"{len(here)} adapter files" if here else f"no adapter file{f' at {inside}' if inside else ''}"
    raise ConfigError(f"{repo} has {what}" + (f"; name one: {listed}" if listed else " (.safetensors)"))


def _request(repo: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:  # those of the hub's library, and of the library that it sends requests with
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RequestError(f"{repo}: the hub could not be reached, or refused: {text}") from None
