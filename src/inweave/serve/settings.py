"""The settings of a worker, from the command line; every problem is reported at once.

Loopback by default. A worker that other machines can reach, by its address or through a proxy, needs a token; without
one it does not start.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from inweave.checked import CheckedModel, FieldError
from inweave.errors import ConfigError, InweaveError, Problem
from inweave.serve.gallery_names import DEFAULT_NAMES, ensure_pattern
from inweave.serve.s3_location import SCHEME, split_location

MEBIBYTE = 1024 * 1024
CLUSTER_ONLY = {"min_runners", "max_runners", "idle_seconds", "runner_cpus", "node_cache", "node_cache_gb"}


def default_data_folder() -> Path:
    """Return the default folder of a worker's queue."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "inweave" / "serve"


class ServeSettings(CheckedModel):
    """Settings of `inweave serve`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", description="the address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=7870, description="0: any free port")
    token: str | None = Field(default=None, description="clients must send it as a bearer token or Basic password")
    tokens: Path | None = Field(default=None, description="a TOML file of accounts: their tokens and their quotas")
    model: str = Field(default="inweave/emoji", description="the model of requests that name none")
    models: dict[str, str] = Field(
        default_factory=dict, description="other models that requests may name: name -> location"
    )
    lora_folders: tuple[Path, ...] = Field(default=(), description="the folders of the library")
    wildcards: tuple[Path, ...] = Field(default=(), description="folders of the files that __name__ in prompts means")
    styles: Path | None = Field(default=None, description="the file of styles; default: styles.csv with shared data")
    upscalers: tuple[Path, ...] = Field(default=(), description="folders of upscalers")
    dataset_folders: tuple[Path, ...] = Field(default=(), description="folders of datasets that may be trained on")
    data: Path = Field(default_factory=default_data_folder, description="the folder of the queue and of results")
    store: str | None = Field(
        default=None, repr=False, description="the queue in PostgreSQL, by its address, which several workers share"
    )
    blobs: Path | str | None = Field(
        default=None, description="images that all workers of a queue share: a folder, or s3://BUCKET/PREFIX"
    )
    shared: Path | None = Field(default=None, description="the folder of datasets, training runs and added LoRAs")
    lease_seconds: Annotated[float, Field(ge=1)] = Field(
        default=30.0, description="after which the jobs of a worker that does not answer run elsewhere"
    )
    devices: tuple[str, ...] = Field(default=(), description="one model process per device; default: one, chosen by it")
    train_devices: tuple[str, ...] = Field(
        default=(), description="devices for training only; the others then only generate"
    )
    cluster: str | None = Field(default=None, description="run jobs in the Ray cluster at this address, auto or local")
    min_runners: Annotated[int, Field(ge=0)] = Field(default=1, description="of a cluster; 0: none without work")
    max_runners: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="of a cluster; default: one per device"
    )
    idle_seconds: Annotated[float, Field(gt=0)] = Field(default=300.0, description="after which a runner is ended")
    runner_cpus: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="CPUs of a runner in a cluster; default: 1 with a GPU, else those of the smallest node",
    )
    node_cache: str = Field(default="~/.cache/inweave/node", description="copies of files on each node")
    node_cache_gb: Annotated[float, Field(gt=0)] = 50.0
    dtype: str | None = None
    quantize: Literal["off", "keep", "fp8", "int8", "int8-hadamard", "nf4", "nf4-hadamard"] = Field(
        default="off", description="how denoisers are held in memory; `inweave.pipeline` explains the values"
    )
    offload: Literal["off", "auto", "blocks"] = Field(
        default="off", description="where the weights of models are; `inweave.pipeline` explains the values"
    )
    quantized_cache_gb: Annotated[float, Field(ge=0, lt=2**20)] = Field(
        default=32.0, description="disk space for quantized denoisers; 0: none"
    )
    batch: Literal["auto"] | Annotated[int, Field(ge=1, le=100)] = Field(
        default="auto", description="images that are made together, at most, of one job or of several"
    )
    graph: Literal["auto", "off"] = Field(
        default="off", description="whether steps are recorded in CUDA graphs on an NVIDIA GPU"
    )
    lora_cache_gb: Annotated[float, Field(ge=0, lt=2**20)] = Field(
        default=4.0, description="memory for LoRAs that were read; the least recently used ones make room"
    )
    memory_gb: Annotated[float, Field(gt=0)] | None = Field(default=None, description="memory for loaded models")
    queue_limit: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    body_bytes: Annotated[int, Field(ge=1024)] = 64 * MEBIBYTE
    lora_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=2048 * MEBIBYTE, description="the largest LoRA file that is accepted"
    )
    image_pixels: Annotated[int, Field(ge=64 * 64)] = 4096 * 4096
    max_images: Annotated[int, Field(ge=1, le=100)] = Field(default=16, description="images in one job")
    job_seconds: Annotated[float, Field(gt=0)] = 3600.0
    train_hours: Annotated[float, Field(gt=0)] = 7 * 24.0
    plan_seconds: Annotated[float, Field(gt=0)] = Field(default=60.0, description="one plan of a training run")
    keep_hours: Annotated[float, Field(gt=0)] = 24.0
    keep_gb: Annotated[float, Field(gt=0)] = 4.0
    gallery: bool = Field(default=True, description="whether images of jobs stay in a folder after their jobs expired")
    pictures: Path | None = Field(default=None, description="the folder of the gallery; default: images in `data`")
    picture_names: str = Field(default=DEFAULT_NAMES, description="names of image files: `inweave.serve.gallery_names`")
    picture_days: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="after which images without a star or an album are deleted; default: never"
    )
    picture_gb: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="size of the gallery, beyond which its oldest images are deleted; default: any"
    )
    captioner: Path | None = Field(
        default=None, description="a local image-to-text model that may caption images of datasets; never downloaded"
    )
    captioner_device: str = Field(default="cpu", description="the device it runs on")
    upload_count: Annotated[int, Field(ge=1, le=1_000_000)] = Field(default=1000, description="uploaded images")
    upload_gb: Annotated[float, Field(gt=0)] = Field(default=1.0, description="size of all uploaded images")
    dataset_gb: Annotated[float, Field(gt=0)] = Field(default=20.0, description="all datasets together")
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0
    origins: tuple[str, ...] = Field(default=(), description="web pages of other origins that may call this worker")
    behind_proxy: bool = Field(default=False, description="obey X-Forwarded-For, -Host and -Proto of `proxies`")
    proxies: tuple[str, ...] = Field(default=("127.0.0.0/8", "::1"), description="addresses of trusted proxies")
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    allow_train: bool = Field(default=True, description="whether train jobs are accepted")

    @field_validator("token")
    @classmethod
    def _long_enough(cls, value: str | None) -> str | None:
        if value is not None and len(value) < 8:  # a message of pydantic's would quote it
            raise FieldError(Problem("token", f"a token of at least 8 characters is needed, got {len(value)}"))
        return value

    @field_validator("store")
    @classmethod
    def _postgresql(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("postgresql://", "postgres://")):  # never quoted: passwords
            raise FieldError(Problem("store", "expected postgresql://USER@HOST/DATABASE, or no --store for SQLite"))
        return value

    @field_validator("blobs", mode="before")
    @classmethod
    def _folder_or_bucket(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value.startswith(SCHEME):
            try:
                split_location(value, "blobs")
            except ConfigError as error:
                raise FieldError(error.problems[0]) from None
            return value
        if "://" in value:
            raise FieldError(Problem("blobs", "expected a folder that all workers see, or s3://BUCKET/PREFIX"))
        return Path(value)

    @field_validator("picture_names")
    @classmethod
    def _pattern(cls, value: str) -> str:
        try:
            return ensure_pattern(value)
        except ConfigError as error:
            raise FieldError(error.problems[0]) from None

    @field_validator("captioner")
    @classmethod
    def _image_to_text(cls, value: Path | None) -> Path | None:
        if value is not None:
            from inweave.models.captioner import ensure_captioner

            try:
                ensure_captioner(value.expanduser())
            except InweaveError as error:
                raise FieldError(Problem("captioner", str(error))) from None
        return value

    @field_validator("proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            ipaddress.ip_network(each, strict=False)
        return value

    @model_validator(mode="after")
    def _devices_once(self) -> ServeSettings:
        problems = [
            Problem("devices", f"{each} is named twice; a device has one model process")
            for each in sorted(set(self.devices))
            if each != "cpu" and self.devices.count(each) > 1
        ]
        problems += [
            Problem("train_devices", f"{each} is not one of the devices: {', '.join(self.devices) or 'none is named'}")
            for each in self.train_devices
            if each not in self.devices
        ]
        if self.devices and set(self.devices) <= set(self.train_devices):
            problems.append(Problem("train_devices", "no device is left to make images"))
        if self.cluster is None:
            problems += [
                Problem(name, "is a setting of a cluster; name one with --cluster ADDRESS")
                for name in sorted(CLUSTER_ONLY & self.model_fields_set)
            ]
        else:
            if self.max_runners is not None and self.max_runners < max(1, self.min_runners):
                problems.append(Problem("max_runners", f"{self.max_runners} is less than min_runners"))
            if self.devices not in ((), ("cpu",), ("cuda",)) or self.train_devices:
                problems.append(Problem("devices", "Ray chooses the devices of a cluster; name the kind: cpu or cuda"))
        if self.store is not None and isinstance(self.blobs, str) and self.shared is None:
            problems.append(
                Problem(
                    "shared", "name a folder that all workers see: an object store holds no datasets, training runs, "
                    "LoRAs, or images of the gallery",
                )
            )  # fmt: skip
        if problems:
            raise FieldError(problems[0])
        return self

    @model_validator(mode="after")
    def _private_without_token(self) -> ServeSettings:
        if not self.needs_token and not self.loopback:
            raise ValueError(
                f"other machines can reach {self.host}, so clients must identify themselves: set a token with --token "
                "or INWEAVE_TOKEN, or listen on 127.0.0.1"
            )
        if not self.needs_token and self.behind_proxy:
            raise ValueError(
                "other machines can reach this worker through its proxy, so clients must identify themselves: set a "
                "token with --token or INWEAVE_TOKEN (the proxy may send it for them)"
            )
        return self

    @property
    def needs_token(self) -> bool:
        """Whether clients must identify themselves."""
        return self.token is not None or self.tokens is not None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    def model_table(self) -> dict[str, str]:
        """Return the location of every model that a request may name."""
        return {model_name(self.model): self.model, **self.models}

    def shared_folder(self) -> Path:
        """Return the folder of datasets, training runs, LoRAs that were uploaded or trained, and of the gallery."""
        if self.shared is not None:
            return self.shared
        return self.blobs if isinstance(self.blobs, Path) else self.data

    def images_folder(self) -> Path:
        """Return the folder of the gallery's parts: that of images, or with an object store the shared one."""
        return self.blobs if isinstance(self.blobs, Path) else self.data if self.blobs is None else self.shared_folder()

    def styles_file(self) -> Path:
        """Return the file of styles."""
        return self.shared_folder() / "styles.csv" if self.styles is None else self.styles

    def gallery_folder(self) -> Path:
        """Return the folder of the gallery."""
        return self.images_folder() / "images" if self.pictures is None else self.pictures.expanduser()

    def private_folders(self) -> tuple[str, ...]:
        """Return the folders whose paths clients must not see: of data, of the library, parents of the others."""
        parents = [Path(where).parent for where in (*self.model_table().values(), *map(str, self.dataset_folders))]
        own = (self.data, self.images_folder(), self.shared_folder(), self.gallery_folder(), self.styles_file().parent)
        return tuple(map(str, (*own, *self.lora_folders, *self.wildcards, *self.upscalers, *parents)))


def model_name(where: str) -> str:
    """Return the name of a model for clients: its hub id or built-in name, or the stem of its file or folder."""
    path = Path(where).expanduser()
    return path.stem if path.exists() else where


def from_options(**options: Any) -> ServeSettings:
    """Return the settings of the given options; others keep their defaults."""
    return ServeSettings(**{name: value for name, value in options.items() if value is not None})
