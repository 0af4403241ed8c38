"""Types of ``import diloco``, for editors and type checkers; nothing runs this file."""

from diloco_learner.joining import join as join
from diloco_ops.api import open_ as open
from diloco_ops.api import up as up

__all__ = ["__version__", "join", "open", "up"]

__version__: str
