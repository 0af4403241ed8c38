"""A task as a learner sees it, independent of its framework: its members, options and model."""
