"""The run's page: drawn at a bounded cost, and served to any number of viewers."""
