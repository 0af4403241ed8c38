"""Embedded `nats-server`s, and snapshots of their streams."""
