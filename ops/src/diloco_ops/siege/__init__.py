"""``diloco siege``: hostile messages under real identities, sent to a rehearsal of a run, and what they do to it."""
