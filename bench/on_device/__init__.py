"""Parts of ``bench/accelerator.py``: what is measured in child processes, and what is made of it."""
