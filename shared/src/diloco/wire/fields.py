"""Types of the fields that messages are made of, with their units and bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

MAX_COUNT = 2**62
MAX_MEMBERS = 4096
MAX_FRAGMENTS = 4096
MAX_SYNCERS = 1024
MAX_REGIONS = 64
MAX_SHARES = 1 << 14
MAX_RANGES = 64
MAX_AXES = 32
MAX_TEXT = 1000  # characters of a sample

BY_FRAGMENT = {"by": "fragment"}  # marks lists with at most one item for each fragment of the run (wire/frame_sizes.py)

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Number = Annotated[int, Meta(ge=1, le=MAX_COUNT)]  # of things that are counted from 1
FragmentIndex = Annotated[int, Meta(ge=0, lt=MAX_FRAGMENTS)]
MemberName = Annotated[str, Meta(max_length=48, pattern=r"^[a-z0-9][a-z0-9_-]{0,47}\Z")]  # "$" would let a line break pass
Region = Annotated[str, Meta(max_length=16, pattern=r"^([a-z0-9][a-z0-9_]{0,15})?\Z")]  # empty: the run has no regions
Software = Annotated[str, Meta(max_length=32, pattern=r"^[0-9A-Za-z.+-]{0,32}\Z")]  # the version of diloco; empty: not said
Text = Annotated[str, Meta(max_length=MAX_TEXT)]  # any characters: who shows it escapes them
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Bits = Literal[1, 2, 4, 8, 16, 32]  # 1 and 2 in runs that require it (control/creation.py)
Pace = Annotated[float, Meta(ge=1, le=16)]
RegionBits = Annotated[list[tuple[Region, Bits]], Meta(max_length=MAX_REGIONS)]  # of offers; of regions where they are fewer
Counts = Annotated[list[Count], Meta(max_length=MAX_FRAGMENTS, extra=BY_FRAGMENT)]
AxisCounts = Annotated[list[Count], Meta(max_length=MAX_AXES)]
ShareId = Annotated[int, Meta(ge=0, lt=MAX_SHARES)]
Range = tuple[ShareId, Count, Number]  # share, first batch, number of batches
Ranges = Annotated[list[Range], Meta(max_length=MAX_RANGES)]  # in order, none touching another
