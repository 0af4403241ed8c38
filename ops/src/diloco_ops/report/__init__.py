"""The report of a run: its data; :mod:`diloco_report` draws them."""
