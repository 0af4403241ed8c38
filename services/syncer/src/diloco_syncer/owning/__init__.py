"""The fragments that a syncer owns: taken over, served, handed over, followed as a standby."""
