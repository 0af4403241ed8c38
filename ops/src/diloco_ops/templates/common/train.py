"""Train the task of this folder: python train.py."""

from settings import LEARNERS, SETTINGS, TOKENS

import diloco

if __name__ == "__main__":
    diloco.up("task.py", learners=LEARNERS, tokens=TOKENS, settings=SETTINGS).wait()
