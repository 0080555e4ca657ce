"""AdamW with both moments in 8 bits: a plain reference and one kernel over a flat buffer."""

from inweave.ops.adam8bit.reference import BLOCK, code_book, corrections, dequantize, fresh, quantize
from inweave.ops.adam8bit.select import step

__all__ = ["BLOCK", "code_book", "corrections", "dequantize", "fresh", "quantize", "step"]
