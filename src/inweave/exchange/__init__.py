"""Files and models joined: load, check, inspect, convert and hash an adapter."""
