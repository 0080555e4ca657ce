"""Images of jobs and uploads in an S3-compatible object store: s3://BUCKET or s3://BUCKET/PREFIX.

Keys, region and address are those that every program for S3 reads: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_REGION, AWS_ENDPOINT_URL_S3, AWS_PROFILE, ~/.aws, or the role of the machine. An object is written whole or not at
all. Other stores than Amazon's are addressed by path (ADDRESS/BUCKET), which all of them support.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError
from inweave.serve.jobs.errors import BlobsLost, StorageError
from inweave.serve.s3_location import SCHEME, split_location

log = logging.getLogger("inweave.serve")
#: seconds until a connection is given up; a call is tried three times
CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 5, 30, 3
CONNECTIONS = 32
#: objects that one call may remove
BATCH = 1000
#: what a store answers if there is nothing under a key
_MISSING = {"NoSuchKey", "404", "NotFound"}


class S3Blobs:
    """Objects below a prefix of a bucket."""

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self._client, self._bucket, self._prefix = client, bucket, prefix

    @classmethod
    def open(cls, location: str) -> S3Blobs:
        """Return the store at s3://BUCKET/PREFIX; raise ConfigError if it cannot be used."""
        bucket, prefix = split_location(location, "blobs")
        store = cls(_client(), bucket, f"{prefix}/" if prefix else "")
        try:
            store.sizes("")
        except (BlobsLost, StorageError) as error:
            raise ConfigError(f"--blobs {location}: {getattr(error, 'reason', error)}") from None
        return store

    @property
    def label(self) -> str:
        return f"{SCHEME}{self._bucket}/{self._prefix}".rstrip("/")

    def part(self, name: str) -> S3Blobs:
        return S3Blobs(self._client, self._bucket, f"{self._prefix}{name}/")

    def write(self, name: str, content: bytes) -> None:
        with self._errors():
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=content)

    def read(self, name: str) -> bytes | None:
        from botocore.exceptions import ClientError

        with self._errors():
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") in _MISSING:
                    return None
                raise
            content: bytes = answer["Body"].read()
            return content

    def path(self, name: str) -> Path | None:
        return None

    def sizes(self, name: str) -> dict[str, int]:
        below = f"{name}/" if name else ""
        return {each["Key"].removeprefix(self._prefix + below): each["Size"] for each in self._listed(below, "/")}

    def ages(self) -> dict[str, float]:
        now, ages = time.time(), dict[str, float]()
        for each in self._listed("", ""):
            name = each["Key"].removeprefix(self._prefix).split("/")[0]
            age = now - each["LastModified"].timestamp()
            ages[name] = min(age, ages.get(name, age))
        return ages

    def remove(self, name: str) -> None:
        try:
            with self._errors():
                keys = [each["Key"] for each in self._listed(f"{name}/", "")]
                for first in range(0, len(keys), BATCH):
                    self._client.delete_objects(
                        Bucket=self._bucket,
                        Delete={"Objects": [{"Key": key} for key in keys[first : first + BATCH]], "Quiet": True},
                    )
                self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)
        except (BlobsLost, StorageError) as error:
            log.error("%s/%s could not be removed: %s", self.label, name, getattr(error, "reason", error))

    def _listed(self, below: str, delimiter: str) -> Iterator[dict[str, Any]]:
        pages = self._client.get_paginator("list_objects_v2")
        with self._errors():
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + below, Delimiter=delimiter):
                yield from page.get("Contents", ())

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise what a store refuses as StorageError, and a store that does not answer as BlobsLost."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
            if status >= 500 or status == 429:
                raise BlobsLost(f"{self.label}: {error}") from error
            raise StorageError(f"the object store refuses a request: {error}") from error
        except (BotoCoreError, HTTPError, OSError) as error:
            if isinstance(error, BlobsLost):
                raise
            raise BlobsLost(f"{self.label}: {error}") from error


def _client() -> Any:
    """Return a client with the settings of the environment."""
    try:
        from boto3.session import Session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise ConfigError('--blobs s3://... needs boto3; install it with: pip install "inweave[s3]"') from None
    options: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "max_pool_connections": CONNECTIONS,
        "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        # stores of others do not know Amazon's newer checksums
        "request_checksum_calculation": "when_required", "response_checksum_validation": "when_required",
    }  # fmt: skip
    try:
        session = Session()
        region = session.region_name or "us-east-1"
        client = session.client("s3", region_name=region, config=Config(**options))
        if ".amazonaws." not in client.meta.endpoint_url:
            config = Config(**options, s3={"addressing_style": "path"})
            client = session.client("s3", region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"--blobs s3://...: the settings of the object store are wrong: {error}") from None
    return client
