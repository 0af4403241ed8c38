"""The coordinator: creates a run, watches it, answers for its status. Not on the path of the data."""
