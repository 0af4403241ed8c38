"""Checkpoints of a whole run: taken, collected from several machines, and restored."""
