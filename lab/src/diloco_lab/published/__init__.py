"""The published tables beside what the simulator gives for them."""
