"""``diloco-server-watch``: asks a NATS server's monitoring port, which stays at loopback, and tells Prometheus the figures."""
