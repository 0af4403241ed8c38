"""A service: its start and end, metrics, health, its folder and the run's folder."""
