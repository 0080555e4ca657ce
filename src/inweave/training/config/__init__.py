"""Settings of a run: the schema, validation, presets, TOML, and kohya's names for them."""
