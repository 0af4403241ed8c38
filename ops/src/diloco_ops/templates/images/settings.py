"""The settings of a run: docs/settings.md has all of them."""

LEARNERS = 2
TOKENS = 60_000
SETTINGS = {"fragments.count": 3, "round.steps": 24}
