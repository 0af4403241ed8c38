"""Changes of a run that goes on."""
