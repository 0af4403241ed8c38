"""The offers that a syncer hears: collected, refused, combined in a region."""
