"""What is trained: batches as tensors and the loss of a batch."""
