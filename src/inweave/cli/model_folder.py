"""What `inweave inspect` prints of the folder of a model, which needs the packages that models need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inweave.cli.extras import require


def described_model(folder: Path, as_json: bool) -> dict[str, Any]:
    """Return the name of a model, its family, and how that was determined."""
    require("generate", as_json)
    from inweave.models.open import open_model

    model = open_model(folder)
    return {"model": model.name, "family": model.family.name, "evidence": list(model.evidence)}
