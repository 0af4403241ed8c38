"""Files of learners' states: their format, their paths, and how they are written and read."""
