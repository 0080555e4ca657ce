"""The gallery, datasets, uploads and training runs on disk."""
