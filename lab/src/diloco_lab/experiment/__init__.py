"""Experiments: a question, arms that answer it over paired seeds, and claims that hold or do not."""
