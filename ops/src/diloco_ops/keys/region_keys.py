"""``diloco keys region``: a region more in the folder of a run's keys.

The folder may name regions that the run does not have: they count for nothing. A run gets another region by a restore
(docs/backup.md), and by then the region's servers and processes need keys.
"""

from __future__ import annotations

from typing import Annotated

import typer

from diloco.errors import SettingsError
from diloco.settings.validation import parse
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import CONTROL
from diloco_ops.keys.place import folder_and
from diloco_ops.keys.roster import IdentityRoster


def region(
    words: Annotated[
        list[str], typer.Argument(metavar="[DIR] REGION", help="The folder of the run's keys, and the region's name.")
    ],
) -> None:
    """Add a region, so that its servers and processes can get keys. The run has the region after a restore."""
    folder, (name,) = folder_and(words, "REGION")
    opened = Folder.open(folder)
    known = opened.roster.regions
    if not known:
        raise SettingsError(
            f"{folder}: run {opened.roster.run!r} has keys without regions; make a new folder: diloco keys init"
        )
    if name == CONTROL or name in known:
        raise SettingsError(
            f"region {name}: already exists; the regions are {', '.join(known)}, and {CONTROL}, the control store"
        )
    parse(IdentityRoster, {"run": opened.roster.run, "regions": [*known, name]}, "diloco keys region")
    opened.add_region(name)
    print(
        f"{folder}: keys for region {name} can now be made (diloco keys add); the run gets the region when it is "
        "restored with it"
    )
