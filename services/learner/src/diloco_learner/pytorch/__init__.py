"""A learner that trains a ``torch.nn.Module`` and imports no JAX (``diloco-learner[torch]``)."""

from importlib.util import find_spec

from diloco_learner.task_api import Aux as Aux
from diloco_learner.task_api import Units as Units

if find_spec("torch") is None:
    raise ModuleNotFoundError(
        "PyTorch is not installed: pip install 'diloco[torch]', or in the checkout: make torch", name="torch"
    )
