"""Object storage: how fast an object is brought here, beside a plain client of obstore.

    weed server -dir=/tmp/weed -s3 -master.telemetry=false    # or any other server that speaks S3
    export AWS_ENDPOINT_URL=http://127.0.0.1:8333 AWS_SKIP_SIGNATURE=true
    python bench/storage.py s3://bench/reading                # an object of 512 MB, five pairs
    python bench/storage.py s3://bench/reading --size-mb 64 --pairs 1

*plain*: obstore's own stream, written into a file. *fetched*: what this project does for ``--data``, into an empty cache.
Both end with ``fsync``. *rate*: the mean ratio of their rates, with its interval of 95 %; target at least 0.8. What a
checkpoint to a bucket costs learners: ``python bench/marker.py --out s3://bench/marker``.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Annotated

import obstore.store
from harness.console import Bench, Result, Script, folder
from harness.host import MB, cpu_s
from harness.intervals import T95, ratio

from diloco.settings.places import parse_place
from diloco.storage.fetching import fetched
from diloco.storage.opening import open_store

TARGET = 0.8


def plain(bucket: str, key: str, target: Path) -> None:
    """Bring an object as the library's documentation does."""
    store = obstore.store.S3Store(bucket, client_options={"allow_http": True})
    with target.open("wb") as file:
        for block in obstore.get(store, key).stream():
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def reading(place: str, *, size_mb: int = 512, pairs: Annotated[int, (1, *T95)] = 5) -> Result:
    """Put an object at a place, and bring it in both ways by turns."""
    at = parse_place(place)
    store = open_store(at)
    if at.scheme != "s3":
        raise SystemExit(f"{place}: expected s3://BUCKET/KEY")
    rates: dict[str, list[float]] = {"fetched": [], "plain": []}
    cpu: dict[str, list[float]] = {"fetched": [], "plain": []}
    with folder() as temporary:
        (temporary / "object").write_bytes(os.urandom(size_mb * MB))
        store.send([(at.key, temporary / "object")])
        (temporary / "object").unlink()
        for pair in range(pairs):
            for kind in ("fetched", "plain") if pair % 2 else ("plain", "fetched"):
                target = temporary / kind
                began_s, began_cpu_s = time.monotonic(), cpu_s(os.getpid())
                if kind == "plain":
                    plain(at.bucket, at.key, target)
                else:
                    fetched(place, target)
                rates[kind].append(size_mb / (time.monotonic() - began_s))
                cpu[kind].append(cpu_s(os.getpid()) - began_cpu_s)
                shutil.rmtree(target, ignore_errors=True)
                target.unlink(missing_ok=True)
        store.delete([at.key])
    found = ratio(rates["fetched"], rates["plain"])
    return {"rates_mb_s": rates, "cpu_s": cpu, "passed": found["ratio"] >= TARGET} | found


def show(result: Result) -> None:
    for kind, rates in result["rates_mb_s"].items():
        cpu = sum(result["cpu_s"][kind]) / len(rates)
        print(f"{kind:8} {', '.join(f'{rate:.0f}' for rate in rates)} MB/s, {cpu:.2f} s of processor time each")
    interval = f" [{result['low']:.3f}, {result['high']:.3f}]" if "low" in result else ""
    print(f"rate: {result['ratio']:.3f}{interval}; target at least {TARGET}")


SCRIPT = Script(__doc__, Bench(reading, show))

if __name__ == "__main__":
    SCRIPT.run()
