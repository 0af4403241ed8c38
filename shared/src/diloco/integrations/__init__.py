"""Trainers that people have already, as learners of a run. Each module imports its trainer, and nothing here imports them."""
