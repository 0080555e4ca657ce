"""The file by which the nodes of a cluster recognize the folder of datasets and training runs.

A node that sees it has the same folder under the same path: it can train, and needs no copies of what lies there.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from inweave.errors import ConfigError
from inweave.serve.settings import ServeSettings

WITNESS = "cluster-id"


def witness_file(settings: ServeSettings) -> Path:
    """Return the file, which is written unless another worker did; raise ConfigError if the folder cannot be used."""
    folder = settings.shared_folder().absolute()
    file = folder / WITNESS
    try:
        folder.mkdir(parents=settings.shared is None, exist_ok=True)
        with contextlib.suppress(FileExistsError), file.open("x") as target:
            target.write(secrets.token_hex(8))
        probe = folder / f".{secrets.token_hex(8)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"--shared {folder}: {error.strerror}; name a folder that exists, can be written, and is mounted under the "
            "same path on every node of the cluster"
        ) from None
    return file
