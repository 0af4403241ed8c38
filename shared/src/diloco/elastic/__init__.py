"""Learners that go on with fewer processes: imported where ``processes.least`` says so, and nowhere else."""
