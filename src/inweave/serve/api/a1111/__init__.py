"""AUTOMATIC1111's API, `/sdapi/v1/...`."""
