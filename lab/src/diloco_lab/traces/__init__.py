"""Traces of failures, read, fitted, and played in the simulator."""
