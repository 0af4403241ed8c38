"""An island of JAX: its mesh, its parameters and optimizer, its one compiled step."""
