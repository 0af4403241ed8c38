"""A learner's protocol side; needs no accelerator library."""
