"""Floating-point modes of a thread, as libraries leave them; the mode before comes back."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# of glibc: where fenv_t has the register, its bits that switch subnormals off, and FE_UPWARD and FE_TOWARDZERO
_REGISTERS = {
    "x86_64": (28, 1 << 15 | 1 << 6, 0x800, 0xC00),
    "aarch64": (0, 1 << 24, 0x400000, 0xC00000),
}
MODES = ("flush", "upward", "towards zero")


@contextmanager
def float_mode(name: str) -> Iterator[None]:
    """One of :data:`MODES` in this thread: subnormals switched off, or another rounding."""
    if platform.machine() not in _REGISTERS or platform.libc_ver()[0] != "glibc":
        pytest.skip("no way is known here to change the mode")
    place, flush, upward, towards_zero = _REGISTERS[platform.machine()]
    library, before = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    assert library.fegetenv(before) == 0
    try:
        if name == "flush":
            changed = ctypes.create_string_buffer(before.raw, 256)
            register = ctypes.c_uint32.from_buffer(changed, place)
            register.value |= flush
            assert library.fesetenv(changed) == 0
        else:
            assert library.fesetround(upward if name == "upward" else towards_zero) == 0
        yield
    finally:
        library.fesetenv(before)
