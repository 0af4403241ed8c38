"""Existing trainers as learners of a run. Each module imports its trainer's library; no other module imports these."""
