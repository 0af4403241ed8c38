"""What more than one test module needs: factories, worlds, examples and checks. No test module imports another one."""

import sys
from pathlib import Path

if "pytest" in sys.modules:  # processes that a test starts do without it
    import pytest

    # so that a failed assert in here shows its values, as in a test module
    pytest.register_assert_rewrite(*(f"{__name__}.{path.stem}" for path in Path(__file__).parent.glob("[!_]*.py")))
