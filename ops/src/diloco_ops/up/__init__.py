"""``diloco up``, and other commands that start or continue a run on this machine."""
