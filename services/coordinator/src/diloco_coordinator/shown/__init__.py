"""Messages of members that a page shows: figures of their processes, samples, and their counts of others' refusals."""
