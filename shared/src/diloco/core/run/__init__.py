"""A run as a whole: its budget, changes, leases, grants and leadership, and the records of what happened."""
