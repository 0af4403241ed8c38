"""``python -m diloco_learner.pytorch``."""

from diloco.process.garbage import importing

with importing():
    from diloco_learner.pytorch.service import main

main()
