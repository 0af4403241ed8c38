"""The `diloco` command, and all that only people need."""
