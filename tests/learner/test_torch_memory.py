"""Where the tensors of a loop lie: in memory without values yet, in too little memory, and on several devices."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from diloco.core.tensors.fragments import build_map
from diloco.errors import RunError
from diloco.testing import VirtualRun

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from torch import nn  # noqa: E402

from diloco_learner.pytorch.tensors import TensorRows  # noqa: E402
from diloco_learner.pytorch.transfers import CudaPort, Transfers  # noqa: E402


def net() -> Any:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    return module


def without_values() -> Any:
    """A module that was made on the meta device; what ``to_empty`` has found in its memory is NaN."""
    with torch.device("meta"):
        module = net()
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.data.fill_(torch.nan)
    return module


class Joining:
    """A run of one fragment with a founder, beside which a module joins that has no values of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.founder, self.found = net(), list[Any]()

    def found_run(self, run: Any) -> None:
        while not run.over:
            with torch.no_grad():
                self.founder[1].weight += 0.01
            run.step(self.founder, loss=1.0)

    def join(self, run: Any) -> None:
        module = run.params
        self.found.append(torch.cat([module[1].bias, module[1].weight.reshape(-1)]).detach().numpy().copy())
        while not run.over:
            run.step(module, loss=1.0)

    def play(self, module: Any) -> Any:
        """Return the version that the joining loop began with, float32 [the fragment]."""
        with VirtualRun({"fragments.count": 1}) as virtual:
            virtual.add_loop("ann", self.found_run, params=lambda: self.founder, data="own")
            virtual.advance(until=lambda: min(virtual.versions(), default=0) >= 2)
            virtual.add_loop("bob", self.join, params=lambda: module, data="own")
            virtual.advance(until=lambda: bool(self.found))
            return virtual.base("bob", 0)


def test_a_module_without_values_takes_those_of_the_run() -> None:
    joining, module = Joining(), without_values()
    module[0].load_state_dict(joining.founder[0].state_dict())
    version = joining.play(module)
    np.testing.assert_array_equal(joining.found[0], version)
    assert np.isfinite(version).all()


def test_frozen_parameters_without_values_are_refused() -> None:
    with pytest.raises(RunError, match="tensor '0/bias', which is not trained, differs from the founder's"):
        Joining().play(without_values())


WITHOUT_ROOM = """
import resource, torch
from diloco.core.tensors.fragments import build_map
from diloco_learner.pytorch.parameters import TorchParameters

torch.set_num_threads(1)
parameters = TorchParameters({"a": torch.zeros(64 << 20)})
[fragment] = build_map(parameters.tensors(None), 1).fragments
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
parameters.snapshot(fragment)
"""


@pytest.mark.tool
def test_a_copy_that_has_no_room_is_an_error_that_says_so() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT_ROOM], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    said = ended.stderr.splitlines()[-1]
    assert "DilocoError: fragment 0: cpu has no room for a copy of its 67,108,864 values (256 MiB), of which an offer" in said


class WithoutStreams(CudaPort):
    """Of devices whose values are copied within the call, as those of other makers are."""

    def serves(self, device: Any) -> bool:
        return False


def test_a_fragment_of_tensors_on_several_devices_is_copied_onto_one() -> None:
    """The devices are PyTorch's fake ones: they have no values, and refuse operations that devices refuse."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        try:
            torch.empty(2, device="cuda:0")[:1]
        except RuntimeError as error:  # PyTorch 2.8 asks for the driver
            pytest.skip(f"this PyTorch has no fake devices without their driver: {str(error).splitlines()[0]}")
        tensors = {"a": torch.empty(3, device="cpu"), "b": torch.empty(2, 2, device="cuda:0")}
        rows = TensorRows(tensors, transfers=Transfers(WithoutStreams()))
        [fragment] = build_map(rows.specs(None, ""), 1).fragments
        assert rows.read(fragment).parts[0].shape == (7,)
        rows.write(fragment, np.zeros(7, np.float32), np.zeros(7, np.float32), 0.5)
