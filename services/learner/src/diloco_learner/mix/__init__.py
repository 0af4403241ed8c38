"""Data of several sources, mixed by weights: what ``--data mix.toml`` names. docs/data.md has the file."""
