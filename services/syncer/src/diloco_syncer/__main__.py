"""``python -m diloco_syncer``."""

from diloco.process.garbage import importing

with importing():
    from diloco_syncer.service import main

main()
