"""The processor's floating-point mode, which the bits of every fold depend on.

Each thread has a mode: how results are rounded, and whether subnormal numbers are replaced by zero (flush-to-zero and
denormals-are-zero, in the register MXCSR of x86-64 and FPCR of AArch64). Any code in a process may change it: a library that
was built with ``-ffast-math`` does when it is loaded, ``torch.set_flush_denormal`` does, and threads inherit it. The same
operations then give other bits than everywhere else.

So all arithmetic that the log, its readers or their accounts depend on is done by functions that are marked :func:`exact`, and
by the kernels, which are marked so, too. They look at the mode of their thread first. Where it is another one they set the
default, IEEE 754's, and put the other one back afterwards: the steps of a learner keep the mode that their author chose.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from diloco.errors import MachineError

P = ParamSpec("P")
R = TypeVar("R")

ENVIRONMENT_BYTES = 256  # room for any C library's fenv_t; glibc's has 32 bytes on x86-64
DEFAULTS = ("_FE_DFL_ENV", "__fe_dfl_env")  # symbols of the default environment: macOS; FreeBSD, and glibc on POWER
NO_SYMBOL = -1  # the default environment in glibc and musl elsewhere

_TINY, _HALF, _LARGE = sys.float_info.min, 0.5, 2.0**1000
_SCALED = 2.0**-23  # their product; its first half is subnormal, and zero where subnormals are flushed
_ONE, _BELOW_HALF, _ABOVE_HALF = 1.0, 2.0**-54, 1.5 * 2.0**-53  # of the distance to the next number
_NEXT = 1.0 + 2.0**-52


def is_standard() -> bool:
    """Return whether this thread rounds to the nearest, half to even, and computes with subnormal numbers."""
    return _TINY * _HALF * _LARGE == _SCALED and _ONE + _BELOW_HALF + _ABOVE_HALF == _NEXT


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function compute in the standard mode, whatever the mode of its thread is. It must not call code of others.

    Raises:
        MachineError: its thread has another mode, which cannot be set.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs) if is_standard() else in_standard_mode(function, *args, **kwargs)

    return call


def in_standard_mode(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Set the standard mode, call a function, and put the mode back that there was.

    Raises:
        MachineError: the mode cannot be set.
    """
    library, default = _library()
    before = ctypes.create_string_buffer(ENVIRONMENT_BYTES)
    if library is None or library.fegetenv(before):
        raise MachineError(_unset())
    try:
        if library.fesetenv(default) or not is_standard():
            raise MachineError(_unset())
        return function(*args, **kwargs)
    finally:
        library.fesetenv(before)


@functools.cache
def _library() -> tuple[Any, ctypes.c_void_p]:
    """Return the C library that sets modes, None where there is none, and the address of its default environment."""
    for name in (None, "libm.so.6"):
        with suppress(OSError, AttributeError, TypeError):
            library = ctypes.CDLL(name)
            library.fegetenv, library.fesetenv  # noqa: B018 - looks the symbols up
            for symbol in DEFAULTS:
                with suppress(ValueError):
                    return library, ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(library, symbol)))
            if sys.platform == "linux":
                return library, ctypes.c_void_p(NO_SYMBOL)
    return None, ctypes.c_void_p()


def _unset() -> str:
    return (
        "this thread's floating-point mode differs from IEEE 754 and cannot be reset: some code in this process has "
        "switched subnormal numbers off (flush-to-zero, denormals-are-zero) or changed the rounding; versions computed "
        "here would differ from those of other members: find the library that was built with -ffast-math, or the call of "
        "torch.set_flush_denormal or fesetround, and remove it"
    )
