"""Fetch the art and the words: eleven packages of the npm registry, at pinned versions.

    https://registry.npmjs.org/<name>/-/<last part of name>-<version>.tgz  ->  <work>/npm/<name>/

No code of a package is run. An archive whose SHA-512 is not the pinned one is refused.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tools.embedded.places import add_work, npm_folder

REGISTRY = "https://registry.npmjs.org"


@dataclass(frozen=True, slots=True)
class Package:
    """One pinned package; ``integrity`` is the registry's own base64 of the archive's SHA-512."""

    name: str
    version: str
    integrity: str

    @property
    def url(self) -> str:
        return f"{REGISTRY}/{self.name}/-/{self.name.rpartition('/')[2]}-{self.version}.tgz"


PACKAGES = (
    Package(
        "@iconify-json/noto",
        "1.2.9",
        "DQiuXENbun41ch+XPSV55H9FaWKpHTyz46YIKtSaKYD4fIDDzL1tR6H4np/T38jfrTAeI3rcKF0mqHYeZVAuaw==",
    ),
    Package(
        "@iconify-json/noto-v1",
        "1.2.5",
        "/DsVMius69Q0fRS53z7QK1TROSuar606jiIx+laXtdsYGMXpf6LtHBx6CGfoo3UHHb/XpBsw+1L1x3eyPqMuVA==",
    ),
    Package(
        "@iconify-json/fluent-emoji-high-contrast",
        "1.2.6",
        "esqhZPpkrF7sNX3NsLoh8KW64okEr/bzko7WNnFP+qTJGAqDPDYjp0925yxuivXy3HtVQB8xhIKu3+Nq1byX5w==",
    ),
    Package(
        "@iconify-json/fluent-emoji-flat",
        "1.2.6",
        "RY47RgPb47fYUiyrA64sIOL0+UU02s29sXpNBbIQRBUlPlfNFTKUmZDERGuxDs/7yNGWqQYvuaSYM1M4fRXlUw==",
    ),
    Package(
        "@lobehub/fluent-emoji-3d",
        "1.1.0",
        "Wlq2lVStTnr8BDpIJ0pEnTKO4LuDxxqTEhTvRtD1DLRF0me7ogeRQjKoehDHXuVJ2Qaecgl5wRBv60lUAG3h7g==",
    ),
    Package(
        "@iconify-json/fxemoji",
        "1.2.2",
        "UAasRaxzFUKfIGSmLwnoarsssA4LX0VLLuEmplIqM6ZNQqIQRtav8tZ4H1neTlBreXuMQyAifr5jP4kn78DpiQ==",
    ),
    Package(
        "@iconify-json/twemoji",
        "1.2.5",
        "uKpuIEV0v6K5BW3Mjdyl+XKFVAbbcPxAgifKvEMtZoUZB5+YiY5zaMm2uNNCxyXzAWU9yNLlj41WU6/mvgALsw==",
    ),
    Package(  # a test: never trained on, never shipped
        "@iconify-json/openmoji",
        "1.2.29",
        "vXdhkqcXVSO6suy+m9LbcUM3OdVyuNOtpV8/als/WqfkQIRxevL5Geb/g+6GH/Qwnq1OqksEmaDGTCmZ5nFKJQ==",
    ),
    Package(  # the other test
        "@iconify-json/emojione",
        "1.2.3",
        "T9+T3HIbJNLKKsmxYKlaYhvnHYkz/HNYTV7SHCXVZPfeUi4FqskY70YeN8yYAZT8cCv7w5vJxS4Q1m8zb9CMMg==",
    ),
    Package(
        "emojibase-data",
        "17.0.0",
        "Yvgb5AWoHViHV/gq1qr5ZAarcBip+B27/ZLRsUJkbgAEaLlZ/fof9g882LTpmEpyhBNEC0m2SEmItljHsTygjA==",
    ),
    Package(
        "emojilib",
        "4.0.3",
        "KbWiYre9aRSaPbHrHZIz9zmoM+21LAsK1VFJtnTh1VCtWE/rNMDviGhQTmselFl95dhqtGlY22iH0leG5BuW0g==",
    ),
)


def download(package: Package) -> bytes:
    """Return the archive of ``package``, checked against its pinned digest."""
    with urllib.request.urlopen(package.url, timeout=120) as answer:
        archive: bytes = answer.read()
    digest = base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if digest != package.integrity:
        raise SystemExit(f"{package.url}: sha512 {digest}, expected {package.integrity}; the archive is not used")
    return archive


def unpack(archive: bytes, folder: Path) -> None:
    """Write an npm archive, whose files are all below `package/`, into ``folder``."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for member in tar.getmembers():
            first, _, rest = member.name.partition("/")
            if member.isfile() and first and rest:
                member.name = rest
                tar.extract(member, folder, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    work: Path = parser.parse_args().work
    for package in PACKAGES:
        folder = npm_folder(work, package.name)
        done = folder / ".version"
        if done.exists() and done.read_text() == package.version:
            print(f"{package.name} {package.version}: already there")
            continue
        archive = download(package)
        unpack(archive, folder)
        done.write_text(package.version)
        print(f"{package.name} {package.version}: {len(archive) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
