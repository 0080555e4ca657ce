"""Training adapters on live models.

    weft.train(weft.TrainConfig.load("style.toml"))

The package is also the function: calling it is `weft.train.session.train`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.train.config import TrainConfig
    from weft.train.run import Finished


class _Train(ModuleType):
    def __call__(self, config: TrainConfig, **options: Any) -> Finished:
        """Train an adapter; everything is checked before the first step. See `weft.train.session.train`."""
        from weft.train.session import train

        return train(config, **options)


sys.modules[__name__].__class__ = _Train
