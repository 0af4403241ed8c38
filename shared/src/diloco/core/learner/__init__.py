"""A learner's decisions: its steps, its rounds, its offers, and the versions that it applies."""
