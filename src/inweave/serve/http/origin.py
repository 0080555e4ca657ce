"""Origins: from which pages a browser may call.

host      on loopback only loopback names: another site may have made its own name resolve to this machine; behind a
          proxy any name, since a token is needed there
origin    a browser's request that changes something must come from this worker's own pages, or from `origins`
sharing   pages of `origins` may read answers; a browser asks for that before it sends a request
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from inweave.serve.settings import ServeSettings

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: requests that pages of allowed origins may send, for the browser's preflight
PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, PUT, PATCH, DELETE"),
    (b"access-control-allow-headers", b"authorization, content-type, idempotency-key, last-event-id, x-client-id"),
    (b"access-control-max-age", b"600"),
)


def sharing_headers(settings: ServeSettings, headers: Mapping[bytes, str]) -> list[tuple[bytes, bytes]]:
    """Return the headers that let a page of an allowed origin read an answer."""
    origin = headers.get(b"origin")
    if origin is None or origin not in settings.origins:
        return []
    return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]


def host_allowed(settings: ServeSettings, headers: Mapping[bytes, str]) -> bool:
    """Return whether a request names a host that this worker answers for."""
    if not settings.loopback or settings.behind_proxy:
        return True
    name = urlsplit(f"//{headers.get(b'host', '')}").hostname or ""
    return name in ("localhost", "127.0.0.1", "::1", settings.host)


def origin_allowed(settings: ServeSettings, method: str, headers: Mapping[bytes, str]) -> bool:
    """Return whether a request changes nothing, or comes from an allowed page or from no page at all."""
    if method in SAFE_METHODS:
        return True
    origin = headers.get(b"origin")
    if origin is None:  # not a browser's request from a page, unless the browser says so
        return headers.get(b"sec-fetch-site", "none") in ("none", "same-origin")
    if origin in settings.origins:
        return True
    parts = urlsplit(origin)
    return bool(parts.netloc) and parts.netloc == headers.get(b"host")
