"""What a run writes: adapter files, metadata, logs, samples."""
