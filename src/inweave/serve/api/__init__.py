"""HTTP APIs of the worker, one package per API; the modules here are shared by all of them."""
