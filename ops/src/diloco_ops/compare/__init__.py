"""Several runs side by side: reading their directories, and the command; :mod:`diloco_report` draws them."""
