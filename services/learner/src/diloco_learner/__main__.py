"""``python -m diloco_learner``."""

from diloco_learner.service import main

main()
