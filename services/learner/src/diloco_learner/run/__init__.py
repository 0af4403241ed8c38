"""A learner's process in a run, independent of the framework: training, evaluation, checkpoints, metrics."""
