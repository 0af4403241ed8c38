"""A task as a learner sees it, whatever framework it is of: its members, options and model."""
