"""What surrounds every API: authentication, limits, sessions, connections, the files of the page."""
