"""PyYAML's safe loader, with a bound on merge keys.

    a: &a {x: 1}
    b: {<<: [*a, *a]}      the pairs of the listed mappings, own pairs and earlier ones first

A mapping that merges others which merge others multiplies its pairs: a file of a kilobyte can hold billions.
"""

from __future__ import annotations

import yaml  # type: ignore[import-untyped]

MAX_PAIRS = 20_000  # looked at while merging, in the whole document
_MERGE, _VALUE = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"


class BoundedLoader(yaml.SafeLoader):  # type: ignore[misc]
    """A safe loader that refuses a document whose merge keys are out of proportion."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._pairs = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace the merge keys of a mapping by the pairs they expand to."""
        self._count(len(node.value))
        sources: list[yaml.Node] = []
        own = []
        for key, value in node.value:
            if key.tag == _MERGE:
                sources += value.value if isinstance(value, yaml.SequenceNode) else [value]
            else:
                key.tag = "tag:yaml.org,2002:str" if key.tag == _VALUE else key.tag
                own.append((key, value))
        node.value = own  # before the others: one of them may be this one
        merged = []
        for source in reversed(sources):
            if not isinstance(source, yaml.MappingNode):
                raise yaml.constructor.ConstructorError(
                    "while constructing a mapping", node.start_mark, "a merge key needs mappings", source.start_mark
                )
            self.flatten_mapping(source)
            self._count(len(source.value))
            merged += source.value
        node.value = [*merged, *own]

    def _count(self, pairs: int) -> None:
        self._pairs += pairs
        if self._pairs > MAX_PAIRS:
            raise yaml.YAMLError("its merge keys (<<) expand to too many settings")
