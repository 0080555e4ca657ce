"""The files of a run: adapters, metadata, logs, samples."""
