"""A dataset on disk -> examples, buckets, captions, cached tensors."""
