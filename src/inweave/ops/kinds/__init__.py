"""The kinds of layer a weight can belong to, and the registry that opens them to a user's own modules."""

from inweave.ops.kinds.base import LayerKind
from inweave.ops.kinds.registry import kind_of, register_layer, registered_kind, stored_transposed
from inweave.ops.kinds.standard import STANDARD_FORWARDS, ConvKind, EmbeddingKind, LinearKind
from inweave.ops.kinds.trial import adds_to_output, departure

__all__ = [
    "STANDARD_FORWARDS", "ConvKind", "EmbeddingKind", "LayerKind", "LinearKind",
    "adds_to_output", "departure", "kind_of", "register_layer", "registered_kind", "stored_transposed",
]  # fmt: skip
