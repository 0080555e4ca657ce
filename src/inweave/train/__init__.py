"""Training adapters on live models.

    inweave.train(inweave.TrainConfig.load("style.toml"))

The package is also the function: calling it is `inweave.train.session.train`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inweave.train.config import TrainConfig
    from inweave.train.run import Finished


class _Train(ModuleType):
    def __call__(self, config: TrainConfig, **options: Any) -> Finished:
        """Train an adapter; everything is checked before the first step. See `inweave.train.session.train`."""
        from inweave.train.session import train

        return train(config, **options)


sys.modules[__name__].__class__ = _Train
