"""Frozen blocks in host memory that are copied to the device while the network computes."""
