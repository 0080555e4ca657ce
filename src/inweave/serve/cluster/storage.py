"""The folder of datasets and training runs of a worker in a cluster, and the file by which nodes recognize it.

<shared>/inweave-<id>/{datasets,training}     the id is kept in the data folder: several workers may share a folder
<data>/{datasets,training}                    without --shared: nodes of the same machine see it
"""

from __future__ import annotations

import secrets
from pathlib import Path

from inweave.errors import ConfigError
from inweave.serve.settings import ServeSettings

WITNESS = "cluster-id"


def storage_folder(settings: ServeSettings) -> Path:
    """Return the folder of datasets and training runs; raise ConfigError if it cannot be used."""
    if settings.cluster is None:
        return settings.data
    settings.data.mkdir(parents=True, exist_ok=True)
    own = settings.data / WITNESS
    if not own.is_file():
        own.write_text(secrets.token_hex(8))
    if settings.shared is None:
        return settings.data.absolute()
    folder = settings.shared.absolute() / f"inweave-{own.read_text()}"
    try:
        folder.mkdir(exist_ok=True)
        (folder / WITNESS).write_text(own.read_text())
    except OSError as error:
        raise ConfigError(
            f"--shared {settings.shared}: {error.strerror}; name a folder that exists, can be written, and is mounted "
            "under the same path on every node of the cluster"
        ) from None
    return folder
