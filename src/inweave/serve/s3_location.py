"""Places in an object store: s3://BUCKET or s3://BUCKET/PREFIX, with letters, digits and ._=+@- in each part."""

from __future__ import annotations

import re

from inweave.errors import ConfigError, Problem

SCHEME = "s3://"
_LOCATION = re.compile(
    r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[\w.=+@-]+(?:/[\w.=+@-]+)*))?/?", re.ASCII
)


def split_location(location: str, field: str) -> tuple[str, str]:
    """Return (bucket, prefix); raise ConfigError that names ``field`` if it is none."""
    match = _LOCATION.fullmatch(location)
    if match is None or {".", ".."} & {*(match["prefix"] or "").split("/")}:
        raise ConfigError(Problem(field, f"expected s3://BUCKET or s3://BUCKET/PREFIX, got {location[:100]!r}"))
    return match["bucket"], match["prefix"] or ""
