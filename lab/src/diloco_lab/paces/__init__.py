"""Paces: how long things take in a trial, as an arm says it or as it was recorded from a live run."""
