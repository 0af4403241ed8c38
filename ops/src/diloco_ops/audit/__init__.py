"""Checks of a run by what it left: ``diloco verify`` and ``diloco replay``."""
