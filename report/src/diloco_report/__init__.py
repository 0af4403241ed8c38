"""A page of charts and tables that opens without a network; knows nothing of a run."""
