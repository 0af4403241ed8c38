"""``diloco page``: the run's page on an operator's machine, with actions that are done by the operator's identity."""
