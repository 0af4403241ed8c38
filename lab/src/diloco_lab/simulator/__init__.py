"""A run in simulated time: lifetimes of learners, interruptions, rounds."""
