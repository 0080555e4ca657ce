"""Training adapters on live models."""
