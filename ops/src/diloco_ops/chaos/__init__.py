"""``diloco chaos``: breaks things in a live run on purpose, puts them right again, and says what came of it."""
