"""A run's weights in files: ``diloco export``, ``eval`` and ``sample``."""
