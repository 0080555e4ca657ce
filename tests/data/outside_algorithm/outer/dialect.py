"""A dialect of another package: the model's own names behind `outer_net.`."""

from __future__ import annotations

from inweave.adapter import Entry, Form
from inweave.formats.dialects.base import Dialect, ModelNames


class Dashed(Dialect):
    """Dotted names, kohya's family of suffixes."""

    name = "dashed"
    description = "the names of the package outer"
    dotted_prefixes = (("outer_net.", ""),)
    form = Form("kohya", norms=True)
    generic = True

    def module(self, entry: Entry, names: ModelNames) -> str:
        return f"outer_net.{entry.ref.name}"


DASHED = Dashed()
