"""``python -m diloco_learner``."""

from diloco_learner.pytorch.service import main

main()
