"""A fragment's log: which entries may follow, what they fold to, in which regions they are committed, what is kept."""
