"""``python -m diloco_syncer``."""

from diloco_syncer.service import main

main()
