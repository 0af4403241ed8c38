"""A run's control: creation, admission, tables, genesis, changes."""
