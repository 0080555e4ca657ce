"""ai-toolkit's YAML and JSON configurations."""
