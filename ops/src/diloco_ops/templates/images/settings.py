"""The settings of a run: docs/settings.md has all of them."""

LEARNERS = 2
TOKENS = 60_000
# steps of 10 ms: an offer is merged that comes within six of them
SETTINGS = {"fragments.count": 3, "round.steps": 24, "round.overlap_steps": 6}
