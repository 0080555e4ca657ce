"""Runners on the machines of a Ray cluster: their endpoint and host, files by hash, as many as the queue needs."""
