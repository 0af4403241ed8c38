"""The durable log: one chain of entries per fragment."""
