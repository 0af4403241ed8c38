"""``diloco repair``: unreadable or unwanted entries and keys of a run, and continuing after them."""
