"""A testing kit: whole runs in virtual time and in one process, with the real services and learners.

:class:`~diloco.testing.virtual_run.VirtualRun` is a run. Its services are those that are installed. A user's own loop is a
learner of it, as it is of a live one by ``diloco.join``. Nothing sleeps, and a seed gives the same run each time.
"""

from diloco.testing.virtual_run import VirtualRun

__all__ = ["VirtualRun"]
