"""A run's values for those who watch them elsewhere: TensorBoard, Weights & Biases."""
