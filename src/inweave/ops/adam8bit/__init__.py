"""AdamW with both moments in 8 bits: a plain reference and one kernel over a flat buffer."""

from inweave.ops.adam8bit.dispatch import step
from inweave.ops.adam8bit.reference import dequantize, quantize
from inweave.ops.adam8bit.work import BLOCK, code_book, corrections, fresh

__all__ = ["BLOCK", "code_book", "corrections", "dequantize", "fresh", "quantize", "step"]
