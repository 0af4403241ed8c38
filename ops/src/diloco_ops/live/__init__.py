"""A run as it happens, in a terminal."""
