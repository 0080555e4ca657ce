"""Opening what a worker keeps: the database that several workers share, and the gallery."""

from __future__ import annotations

import sqlite3

from inweave.errors import ConfigError
from inweave.files.paths import printable_path
from inweave.serve.jobs.blobs import BlobStore, FolderBlobs
from inweave.serve.jobs.errors import StorageError
from inweave.serve.jobs.s3 import S3Blobs
from inweave.serve.jobs.sql import Database
from inweave.serve.settings import ServeSettings
from inweave.serve.storage.gallery import GalleryStore


def open_database(settings: ServeSettings) -> Database | None:
    """Return the database that several workers share; None if this one has its own."""
    if settings.store is None:
        return None
    try:
        from inweave.serve.jobs.postgresql import PostgresDatabase
    except ImportError:
        raise ConfigError('--store needs psycopg; install it with: pip install "inweave[postgresql]"') from None
    return PostgresDatabase(settings.store)


def open_blobs(settings: ServeSettings) -> BlobStore:
    """Return where images of jobs and uploads are; raise ConfigError if an object store cannot be used."""
    if isinstance(settings.blobs, str):
        return S3Blobs.open(settings.blobs)
    return FolderBlobs(settings.images_folder())


def open_gallery(settings: ServeSettings, database: Database | None) -> GalleryStore | None:
    """Return the gallery; None with `--no-gallery`. Raise ConfigError if its folder cannot be used."""
    if not settings.gallery:
        return None
    days, size = settings.picture_days, settings.picture_gb
    folder = settings.gallery_folder()
    try:
        return GalleryStore(
            folder, settings.images_folder() / "thumbnails", names=settings.picture_names,
            keep_seconds=None if days is None else days * 24 * 3600, database=database, data=settings.data,
            keep_bytes=None if size is None else int(size * 1024**3),
        )  # fmt: skip
    except (OSError, StorageError, sqlite3.Error, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"{printable_path(folder)}: cannot be used as the folder of the gallery: {reason}; choose one with "
            "--pictures, or go without it: --no-gallery"
        ) from None
