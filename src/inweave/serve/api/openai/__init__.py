"""OpenAI's image API, `/v1/images/...` and `/v1/models`."""
