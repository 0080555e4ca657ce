"""Weight sources: where a network's tensors come from, with adapters merged on the way in."""
