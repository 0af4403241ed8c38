"""``diloco repair``: what of a run's logs and bucket cannot be read, or is not wanted, and going on behind it."""
