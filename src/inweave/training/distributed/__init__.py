"""Several processes: collectives, launchers, sharding."""
