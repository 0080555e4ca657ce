"""The worker: a web process that keeps a durable queue, and one process per device that runs the jobs."""
