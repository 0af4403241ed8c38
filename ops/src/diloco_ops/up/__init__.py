"""``diloco up`` and what begins or goes on with a run on this machine."""
