"""A learner over a ``torch.nn.Module``. It imports no JAX: a process of it has one framework (``diloco-learner[torch]``)."""

from diloco_learner.task_api import Aux as Aux
from diloco_learner.task_api import Units as Units
