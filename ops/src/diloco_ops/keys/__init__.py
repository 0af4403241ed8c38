"""``diloco keys``: the identities that may take part in a run, made and kept by its operator."""
