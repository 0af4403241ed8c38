"""Reading a run from its directory or its servers."""
