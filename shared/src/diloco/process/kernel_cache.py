"""The folder that the compiled kernels are kept in, for an account that cannot write the installation or a home directory.

numba looks for a folder by itself: ``NUMBA_CACHE_DIR``, then the source's, then the user's cache. Where none of these can be
written, :func:`choose` names one of ours. Without any, each process compiles the kernels in memory, in ten seconds.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from diloco.core.tensors import compiled
from diloco.errors import SettingsError
from diloco.settings import folders

FOLDER = "NUMBA_CACHE_DIR"
NAME = "kernels"


def choose(*candidates: Path) -> None:
    """Have numba keep the kernels below the first folder that this process may write, if it would find none by itself.

    The choice is in the environment: processes that this one starts have it, too.
    """
    named, user = os.environ.get(FOLDER), folders.user_cache()
    own = [Path(named)] if named else []
    own += [Path(compiled.__file__).parent / "__pycache__"]
    own += [] if user is None else [user / "numba"]
    if not any(map(folders.can_write, own)):
        for candidate in candidates:
            with suppress(SettingsError):
                folder = folders.expanded(candidate, "").absolute() / NAME
                if folders.can_write(folder):
                    os.environ[FOLDER] = str(folder)
                    break
        if "numba" in sys.modules:
            from numba import config  # waits where another thread is importing it

            config.reload_config()
