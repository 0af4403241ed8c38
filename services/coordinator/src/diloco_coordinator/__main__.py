"""``python -m diloco_coordinator``."""

from diloco_coordinator.service import main

main()
