"""The dialects that can be written, by name."""

from __future__ import annotations

from inweave.formats.candle import Candle
from inweave.formats.comfy import Comfy
from inweave.formats.dotted import Bfl, Diffusers, Peft
from inweave.formats.flat import Kohya, OneTrainer
from inweave.formats.spell import Writer

WRITERS: dict[str, Writer] = {
    writer.name: writer for writer in (Kohya(), Diffusers(), Peft(), Comfy(), OneTrainer(), Bfl(), Candle())
}
