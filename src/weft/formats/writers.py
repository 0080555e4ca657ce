"""The dialects that can be written, by name."""

from __future__ import annotations

from weft.formats.candle import Candle
from weft.formats.comfy import Comfy
from weft.formats.dotted import Bfl, Diffusers, Peft
from weft.formats.flat import Kohya, OneTrainer
from weft.formats.spell import Dialect

WRITERS: dict[str, Dialect] = {
    writer.name: writer for writer in (Kohya(), Diffusers(), Peft(), Comfy(), OneTrainer(), Bfl(), Candle())
}
