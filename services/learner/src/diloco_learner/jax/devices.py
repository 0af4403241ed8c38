"""The devices that JAX computes on, as they are shown to people."""

from __future__ import annotations

import jax


class OnDevices:
    """A model on the devices that JAX has."""

    @property
    def device(self) -> str:
        """Their kind, and how many there are where it is more than one."""
        count, kind = jax.device_count(), str(jax.local_devices()[0].device_kind)
        return f"{count} x {kind}" if count > 1 else kind

    def device_bytes(self) -> int | None:
        """Return the memory in use on this process's devices; None where it is not known, as on CPUs. From any thread."""
        used = [(device.memory_stats() or {}).get("bytes_in_use") for device in jax.local_devices()]
        known = [int(each) for each in used if each is not None]
        return sum(known) if known else None
