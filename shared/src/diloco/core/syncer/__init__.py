"""A syncer's decisions: which fragments it owns, whom a round waits for, and what is merged."""
