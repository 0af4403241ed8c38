"""``diloco top``: any run in a terminal, with keys."""
