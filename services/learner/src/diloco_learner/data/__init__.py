"""The batches of a task's data."""
