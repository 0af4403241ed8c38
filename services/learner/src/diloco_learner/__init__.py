"""A learner: an island of accelerators that trains a model of its own with JAX, in step with a run."""
