"""``python -m diloco_learner``."""

from diloco.process.garbage import importing

with importing():
    from diloco_learner.service import main

main()
