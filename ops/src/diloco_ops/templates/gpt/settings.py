"""The settings of a run: docs/settings.md has all of them."""

LEARNERS = 2
TOKENS = 500_000
SETTINGS = {"fragments.count": 8, "task.batch": 8, "task.context": 128}
