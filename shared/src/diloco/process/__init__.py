"""A process of ours: structured events, log files, tapes, tasks, files, retries."""
