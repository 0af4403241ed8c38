"""``python -m diloco_coordinator``."""

from diloco.process.garbage import importing

with importing():
    from diloco_coordinator.service import main

main()
