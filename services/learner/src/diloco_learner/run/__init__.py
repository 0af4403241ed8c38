"""A learner's process in a run, whatever framework computes: training, evaluating, checkpoints, metrics."""
