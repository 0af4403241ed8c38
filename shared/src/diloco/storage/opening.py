"""From a place to the store that has it. The libraries are optional: ``pip install 'diloco[storage]'``."""

from __future__ import annotations

from importlib.util import find_spec

from diloco.errors import DilocoError
from diloco.settings.places import StoragePlace
from diloco.storage.object_store import ObjectStore

LIBRARIES = {"hf": "huggingface_hub"}  # by scheme; all others need obstore


def open_store(place: StoragePlace) -> ObjectStore:
    """Return the bucket, repository or server of a place. Nothing is asked of it yet.

    Raises:
        DilocoError: the library for it is not installed.
        SettingsError: its configuration in the environment makes no sense.
    """
    library = LIBRARIES.get(place.scheme, "obstore")
    if find_spec(library) is None:
        raise DilocoError(f"{place}: not installed: {library}; pip install 'diloco[storage]'")
    if place.scheme == "hf":
        from diloco.storage.hub_store import HubStore

        return HubStore(place)
    from diloco.storage.cloud_store import open_cloud

    return open_cloud(place)
