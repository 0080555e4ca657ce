"""From a dataset on disk to examples, buckets, captions and cached tensors."""
