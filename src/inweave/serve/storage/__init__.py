"""Datasets, uploads and training runs on disk."""
