"""One shard of the syncer: collects outer gradients, merges them, appends versions to the log. CPU only."""
