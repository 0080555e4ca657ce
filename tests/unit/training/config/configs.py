"""Configurations of a run that name what a test is about, and no more."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.config.schema import TrainConfig


def of(**fields: Any) -> TrainConfig:
    """Notes about ignored settings are tested where they matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TrainConfig.of(**{"dataset": "pictures", **fields})


def problems(**fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        of(**fields)
    return str(caught.value)
