"""Accounts: the tokens of a file, each with a name and quotas.

    [alice]                     the name, in messages and metrics
    token = "..."               at least 8 characters
    queued_jobs = 20            jobs that wait, of every kind
    training_jobs = 1           train jobs that wait or run
    images_per_day = 500        images of the jobs of the last 24 hours, also of those that failed
    upload_gb_per_day = 2.0     gigabytes of request bodies of the last 24 hours: uploads, datasets, LoRAs, images

A quota that is left out does not limit. Tokens are for limits: every account sees all jobs and the whole library,
and its own images in the gallery.
"""

from __future__ import annotations

import tomllib
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from inweave.checked import CheckedModel
from inweave.errors import ConfigError, Problem
from inweave.files.paths import printable_path

GIBIBYTE = 1024**3
Limit = Annotated[int, Field(ge=0)] | None


class Account(CheckedModel):
    """One token, and what its requests may take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    token: Annotated[str, Field(min_length=8, max_length=1000, repr=False)]
    queued_jobs: Limit = None
    training_jobs: Limit = None
    images_per_day: Limit = None
    upload_gb_per_day: Annotated[float, Field(ge=0)] | None = None

    @property
    def quotas(self) -> dict[str, int]:
        """The limits by name; that of uploads in bytes."""
        size = self.upload_gb_per_day
        limits = {
            "queued_jobs": self.queued_jobs, "training_jobs": self.training_jobs,
            "images_per_day": self.images_per_day,
            "upload_gb_per_day": None if size is None else int(size * GIBIBYTE),
        }  # fmt: skip
        return {name: limit for name, limit in limits.items() if limit is not None}


#: of the request that is being answered; None: the caller has no quotas
CURRENT: ContextVar[Account | None] = ContextVar("account", default=None)


def read_accounts(path: Path) -> tuple[Account, ...]:
    """Return the accounts of a TOML file; raise ConfigError with everything that is wrong, without any token."""
    label = printable_path(path)
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--tokens {label}: cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tokens {label}: not a TOML file: {_without_values(error)}") from None
    problems: list[Problem] = []
    accounts: list[Account] = []
    for name, table in tables.items():
        try:
            if not isinstance(table, dict):
                raise ConfigError(f"expected a table [{name}] with a token")
            if not isinstance(token := table.get("token"), str) or not 8 <= len(token) <= 1000:
                raise ConfigError(Problem("token", "a text of 8 to 1,000 characters is needed"))
            accounts.append(Account(**{**table, "name": name}))
        except ConfigError as error:
            problems += [Problem(None, f"--tokens {label}, {name[:64]}: {each}") for each in error.problems]
    if len({each.token for each in accounts}) < len(accounts):
        problems.append(Problem(None, f"--tokens {label}: two accounts have the same token"))
    if not tables:
        problems.append(Problem(None, f"--tokens {label}: there is no account in it"))
    if problems:
        raise ConfigError(problems)
    return tuple(accounts)


def _without_values(error: ValueError) -> str:
    return getattr(error, "msg", None) or "not UTF-8"
