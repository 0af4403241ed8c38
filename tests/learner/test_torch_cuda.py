"""Loops on a CUDA device: what is read and written is right while the device is behind, and ``run.step`` does not wait for it.

The tests of whole runs take a CPU too, where there is no such device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from diloco.core.tensors.fragments import FragmentMap, build_map
from diloco.errors import SettingsError
from diloco.testing import VirtualRun

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from diloco_learner.pytorch.parameters import TorchParameters  # noqa: E402

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
BUSY_CYCLES = 500_000_000  # a quarter of a second or so, far longer than the host needs for what a test queues
SIZE = 1 << 20  # values of a tensor


def joined(count: int = 4) -> tuple[dict[str, Any], TorchParameters, FragmentMap]:
    params = {name: torch.zeros(1024, SIZE // 1024, device="cuda") for name in "ab"}
    parameters = TorchParameters(params)
    return params, parameters, build_map(parameters.tensors(None), count)


def keep_busy() -> Any:
    """Have the device do something for long; return the event behind it."""
    torch.cuda._sleep(BUSY_CYCLES)
    event = torch.cuda.Event()
    event.record()
    return event


@needs_cuda
def test_a_copy_has_the_values_of_its_boundary_and_the_loop_s_thread_does_not_wait() -> None:
    params, parameters, fragments = joined()
    [parameters.snapshot(fragment).to_host() for fragment in fragments.fragments]  # memory and streams are there
    with ThreadPoolExecutor(1) as reader:
        for step in range(3):
            busy = keep_busy()
            parameters.take(params)
            copies = [parameters.snapshot(fragment) for fragment in fragments.fragments]
            arrived = [reader.submit(each.to_host) for each in copies]
            for _ in range(100):
                for tensor in params.values():
                    tensor += 1
            assert not busy.query(), "all of it was queued while the device was busy"
            for each in arrived:
                assert set(each.result().tolist()) == {100.0 * step}


@needs_cuda
def test_a_copy_beside_steps_in_a_stream_of_the_loop_s_own_is_whole() -> None:
    params, parameters, fragments = joined()
    with torch.cuda.stream(torch.cuda.Stream()), ThreadPoolExecutor(4) as readers:
        parameters.take(params)
        keep_busy()
        for tensor in params.values():
            tensor += 1
        copies = list(readers.map(parameters.snapshot, fragments.fragments))  # as where all ranks found a run
        for tensor in params.values():
            tensor += 1
        for each in copies:
            assert set(each.to_host().tolist()) == {1.0}


@needs_cuda
def test_versions_are_written_between_the_steps_and_the_loop_s_thread_does_not_wait() -> None:
    params, parameters, fragments = joined()
    places = [tensor.data_ptr() for tensor in params.values()]
    thetas = [np.full(fragment.size, 3.0, np.float32) for fragment in fragments.fragments]
    base = [np.full(fragment.size, 1.0, np.float32) for fragment in fragments.fragments]
    for fragment, theta in zip(fragments.fragments, thetas, strict=True):
        parameters.write(fragment, theta)
    busy = keep_busy()
    for tensor in params.values():
        tensor += 1  # 4
    for fragment, theta, before in zip(fragments.fragments, thetas, base, strict=True):
        parameters.write(fragment, theta, before)  # 3 + (4 - 1)
        theta[:], before[:] = np.nan, np.nan
    for tensor in params.values():
        tensor *= 2
    assert not busy.query()
    assert all(bool((tensor == 12).all()) for tensor in params.values())
    assert [tensor.data_ptr() for tensor in params.values()] == places


@needs_cuda
def test_a_loss_is_that_of_its_step_and_is_not_waited_for() -> None:
    _, parameters, _ = joined()
    loss = torch.full((), 2.5, device="cuda", dtype=torch.bfloat16)
    parameters.number(loss)()
    busy = keep_busy()
    first = parameters.number(loss)
    loss.fill_(7.0)
    second = parameters.number(loss)
    assert not busy.query()
    assert (first(), second()) == (2.5, 7.0)


@needs_cuda
def test_fragments_that_are_due_together_take_the_room_of_one_on_the_device() -> None:
    _, parameters, fragments = joined(8)
    largest_bytes = 4 * max(fragment.size for fragment in fragments.fragments)
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    copies = [parameters.snapshot(fragment) for fragment in fragments.fragments]
    assert all(not each.to_host().any() for each in copies)
    assert torch.cuda.max_memory_allocated() - before_bytes <= largest_bytes + 4096


@needs_cuda
def test_a_step_while_a_graph_is_captured_is_refused() -> None:
    params, parameters, _ = joined()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(SettingsError, match=r"a CUDA graph is being captured, .* call run.step after graph.replay\(\)"):
            parameters.take(params)
        params["a"] += 1


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self, *, recomputed: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.recomputed = nn.Linear(16, 32), nn.Linear(32, 4), recomputed

    def forward(self, x: Any) -> Any:
        hidden = checkpoint(self.first, x, use_reentrant=False) if self.recomputed else self.first(x)
        return self.last(torch.tanh(hidden))


Step = Callable[[], Any]  # takes one, and returns its loss


def plain(net: Any, x: Any, **adam: Any) -> Step:
    optimizer = torch.optim.AdamW(net.parameters(), 0.01, **adam)

    def step() -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def graphed(net: Any, x: Any) -> Step:
    """Return a replay of a whole step, with static gradients, optimizer and loss."""
    step = plain(net, x, capturable=True)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Any:
        graph.replay()
        return loss

    return replay


def train(module: Any, make_step: Callable[[], Step]) -> None:
    """Train alone in a run to its end, and check that the module has the model of the log and a loss that fell."""
    losses = list[float]()

    def loop(run: Any) -> None:
        step = make_step()
        while not run.over:
            loss = step()
            losses.append(loss.item())
            run.step(module, loss=loss)

    with VirtualRun({"tokens": 8192, "learners": 1, "round.steps": 8, "fragments.count": 4}) as virtual:
        virtual.add_loop("ann", loop, params=lambda: module, data="own", tokens=16)
        virtual.advance()
        values = {name.replace(".", "/"): value.detach().cpu() for name, value in module.named_parameters()}
        for fragment in virtual._member("ann").map.fragments:
            found = [values[piece.path][piece.row_start : piece.row_stop].reshape(-1) for piece in fragment.pieces]
            np.testing.assert_array_equal(torch.cat(found).numpy(), virtual.base("ann", fragment.index))
        assert virtual.accounts("ann").loss in losses
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["plain", "fused", "recomputed", "compiled"])
def test_a_loop_ends_with_the_model_of_the_log_however_it_computes(device: str, kind: str) -> None:
    torch.manual_seed(0)
    net = Net(recomputed=kind == "recomputed").to(device)
    x = torch.randn(16, 16, device=device)
    backend = "eager" if device == "cpu" else "inductor"
    computed = torch.compile(net, backend=backend) if kind == "compiled" else net
    train(net, lambda: plain(computed, x, fused=kind == "fused"))


@needs_cuda
def test_a_loop_of_a_captured_graph_ends_with_the_model_of_the_log() -> None:
    torch.manual_seed(0)
    net = Net().to("cuda")
    x = torch.randn(16, 16, device="cuda")
    train(net, lambda: graphed(net, x))


@needs_cuda
def test_a_loop_of_compiled_graphs_ends_with_the_model_of_the_log() -> None:
    torch.manual_seed(0)
    net = Net().to("cuda")
    x = torch.randn(16, 16, device="cuda")
    computed = torch.compile(net, mode="reduce-overhead")
    train(net, lambda: plain(computed, x, fused=True))


@needs_cuda
def test_a_step_of_a_run_waits_for_the_step_before_and_not_for_its_own() -> None:
    net, waited = nn.Linear(1024, 1024, bias=False, device="cuda"), list[bool]()

    def loop(run: Any) -> None:
        while not run.over:
            with torch.no_grad():
                net.weight.add_(1e-3)
            busy = keep_busy()
            run.step(net, loss=net.weight[0, 0].clone())
            if run.steps > 2:  # memory and streams are there
                waited.append(busy.query())

    with VirtualRun({"tokens": 512, "learners": 1, "round.steps": 8, "fragments.count": 4}) as virtual:
        virtual.add_loop("ann", loop, params=lambda: net, data="own", tokens=16)
        virtual.advance()
    assert len(waited) > 20
    assert not any(waited)
