"""Changes of a live run."""
