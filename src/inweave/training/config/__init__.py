"""Settings of a run: the schema, what contradicts what, presets, and the files of other trainers."""
