"""The model inside the package, `inweave/emoji`: a complete Stable Diffusion of 28 MB that draws emoji.

emoji/model_index.json, unet/, vae/, text_encoder/, tokenizer/, scheduler/    the model, in diffusers' layout
emoji/loras/*.safetensors                                                     style LoRAs, in kohya naming
emoji/styles/<name>/*.png, *.txt                                              what they were trained on
"""

from __future__ import annotations

from pathlib import Path

from inweave.errors import ConfigError
from inweave.exchange.lookup import packaged_loras, packaged_model
from inweave.models.families.base import Variant
from inweave.models.families.sd import SD

NAME = "inweave/emoji"
VARIANT = Variant(NAME, SD.name, NAME, 128, 20, 3.0, "v_prediction", zero_terminal_snr=True)
#: how adapters for it are trained by default; another version of it, in a folder, is trained so too
PRESET = SD.presets[NAME]


def folder() -> Path:
    """Return its folder inside the installed package."""
    return packaged_model()


def loras() -> dict[str, Path]:
    """Return the style LoRAs that come with it, by name."""
    return {path.stem: path for path in packaged_loras()}


def styles() -> tuple[str, ...]:
    """Return the style datasets that come with it."""
    return tuple(sorted(path.name for path in (folder() / "styles").iterdir() if path.is_dir()))


def style_folder(name: str) -> Path:
    """Return the folder of a style dataset, `pixel` or `inweave/pixel`."""
    name = name.removeprefix("inweave/")
    if name not in styles():
        raise ConfigError(f"no style dataset is called {name!r}; the package has {', '.join(styles())}")
    return folder() / "styles" / name
