"""rbee's event stream and worker contract."""
