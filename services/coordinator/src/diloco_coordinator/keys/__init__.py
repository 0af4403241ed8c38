"""Who may take part in a run, made and kept by its operator: ``diloco keys``."""
