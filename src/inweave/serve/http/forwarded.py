"""Requests that a proxy passes on, as its own caller sent them.

    X-Forwarded-For      ..., client, proxy     the last address outside of `proxies` is the caller
    X-Forwarded-Host     the host name in the caller's address
    X-Forwarded-Proto    http | https

Headers of a list end with what the nearest proxy wrote; what comes before may be made up by the caller. Connections
from other addresses than `proxies` are taken unchanged: anybody may write these headers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence

from starlette.types import Scope

from inweave.serve.settings import ServeSettings

_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*)|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def as_forwarded(settings: ServeSettings, scope: Scope) -> Scope:
    """Return a request with the client, the host and the scheme that a trusted proxy states."""
    peer = address_of((scope.get("client") or ("",))[0])
    if not settings.behind_proxy or peer is None or not _is_proxy(peer, settings.proxies):
        return scope
    forwarded = _elements(scope["headers"])
    changed = dict(scope)
    if (client := _client(forwarded.get(b"x-forwarded-for", ()), settings.proxies)) is not None:
        changed["client"] = (str(client), 0)
    if (scheme := _last(forwarded, b"x-forwarded-proto").lower()) in ("http", "https"):
        changed["scheme"] = scheme
    if _HOST.fullmatch(host := _last(forwarded, b"x-forwarded-host")):
        others = [(name, value) for name, value in scope["headers"] if name != b"host"]
        changed["headers"] = [(b"host", host.encode()), *others]
    return changed


def address_of(text: str) -> Address | None:
    """Return an address with or without a port; None if it is none."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_proxy(address: Address, proxies: Sequence[str]) -> bool:
    return any(address in ipaddress.ip_network(each, strict=False) for each in proxies)


def _client(values: Sequence[str], proxies: Sequence[str]) -> Address | None:
    """Return the address that called the outermost of our proxies."""
    client = None
    for text in reversed(values):
        if (address := address_of(text)) is None:
            break
        client = address
        if not _is_proxy(address, proxies):
            break
    return client


def _elements(headers: Sequence[tuple[bytes, bytes]]) -> Mapping[bytes, list[str]]:
    """Return the elements of every forwarding header, in the order in which proxies added them."""
    values: dict[bytes, list[str]] = {}
    for name, value in headers:
        if name.startswith(b"x-forwarded-"):
            values.setdefault(name, []).extend(part.strip() for part in value.decode("latin-1").split(","))
    return values


def _last(values: Mapping[bytes, list[str]], name: bytes) -> str:
    return (values.get(name) or [""])[-1]
