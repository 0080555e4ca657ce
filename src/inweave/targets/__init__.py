"""Names of a model's tensors: known bases, name tables, and where each part of an adapter goes."""
