"""The order of copies between a device and the host, on a device that makes them as late as its streams allow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from diloco.core.learner.delta import Baseline, EncodedOffer, Offered
from diloco.core.tensors.fragments import FragmentMap, build_map
from diloco.core.tensors.quantise import quantise
from diloco.errors import DilocoError, SettingsError
from diloco.testing import VirtualRun

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make torch")

import diloco_learner.pytorch.parameters as joined_parameters  # noqa: E402
from diloco_learner.pytorch.parameters import TorchParameters  # noqa: E402
from diloco_learner.pytorch.tensors import TensorRows  # noqa: E402
from diloco_learner.pytorch.transfers import CopyEvent, CudaPort, Transfers  # noqa: E402


class LateEvent:
    """A place in a stream. The work before it is done when it is waited for, if it was not done before."""

    def __init__(self, port: LatePort, stream: list[Callable[[], None]]) -> None:
        self._port, self._stream, self._until = port, stream, len(stream)

    def synchronize(self) -> None:
        self._port.do(self._stream, self._until)


class LatePort:
    """A device in the memory of the host.

    What the loop's stream computes is computed at once. Copies to the host are made when an event behind them is waited for, in
    order, so after all steps that may come before. Page-locked memory is NaN until then.
    """

    def __init__(self) -> None:
        self._loop: list[Callable[[], None]] = []
        self._beside: list[Callable[[], None]] = []
        self._done: dict[int, int] = {}  # by stream: works
        self.attached = list[list[Any]]()
        self.sent = list[tuple[Any, Any]]()  # page-locked memory, and what it had when its copy was queued
        self.waits = list[str]()  # names of the threads that have waited

    def serves(self, device: Any) -> bool:
        return True

    def attach(self, devices: Iterable[Any]) -> None:
        self.attached.append(list(devices))

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pinned(self, count: int) -> Any:
        return torch.full((count,), torch.nan)

    def send(self, source: Any, device: Any) -> Any:
        self.sent.append((source, source.clone()))
        return source.clone()

    def bring(self, source: Any, target: Any) -> LateEvent:
        values = source.clone()  # the stream goes on with what it has now
        self._loop.append(lambda: target.copy_(values))
        return LateEvent(self, self._loop)

    def bring_beside(self, source: Any, target: Any) -> LateEvent:
        self._beside.append(lambda: target.copy_(source))
        return LateEvent(self, self._beside)

    def hold(self, device: Any, event: CopyEvent) -> None:
        event.synchronize()

    def do(self, stream: list[Callable[[], None]], until: int) -> None:
        self.waits.append(threading.current_thread().name)
        done = self._done.get(id(stream), 0)
        for work in stream[done:until]:
            work()
        self._done[id(stream)] = max(done, until)


def tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    strided = torch.randn(4, 6).T
    return {"bias": torch.randn(5), "scale": torch.tensor(2.0), "strided": strided, "weight": torch.randn(7, 3)}


def joined(params: Any, count: int = 3) -> tuple[TorchParameters, FragmentMap, LatePort]:
    port = LatePort()
    parameters = TorchParameters(params, Transfers(port))
    return parameters, build_map(parameters.tensors(None), count), port


def values_of(params: dict[str, Any], fragment: Any) -> list[float]:
    """Return a fragment's values in the order of the log."""
    found = list[float]()
    for piece in fragment.pieces:
        tensor = params[piece.path]
        found += (tensor[piece.row_start : piece.row_stop] if tensor.ndim else tensor).float().reshape(-1).tolist()
    return found


def test_a_copy_has_the_values_of_its_boundary_whatever_steps_come_before_it_is_made() -> None:
    params = tensors()
    parameters, fragments, port = joined(params)
    expected = [values_of(params, fragment) for fragment in fragments.fragments]
    copies = [parameters.snapshot(fragment) for fragment in fragments.fragments]
    for tensor in params.values():
        tensor += 1  # the next step
    assert not any(each.is_on_host for each in copies), "a thread that waits for a device reads it"
    port.waits.clear()
    reader = threading.Thread(target=lambda: found.extend(each.to_host().tolist() for each in copies), name="reader")
    found = list[list[float]]()
    reader.start()
    reader.join()
    assert found == expected
    assert set(port.waits) == {"reader"}, "the loop's thread waits for no copy"


def test_values_that_are_asked_for_in_another_order_or_never_are_those_of_their_fragment() -> None:
    params = tensors()
    parameters, fragments, _ = joined(params)
    first, second, third = fragments.fragments
    expected = [values_of(params, fragment) for fragment in (first, third)]
    early = parameters.snapshot(first)
    parameters.snapshot(second)  # of a round that another boundary answers
    late = parameters.snapshot(third)
    out = np.empty(first.size, np.float32)
    assert late.to_host().tolist() == expected[1]
    assert early.to_host(out) is out
    assert out.tolist() == expected[0]


def test_one_fragment_is_on_the_device_at_a_time() -> None:
    """Each copy has waited on the device until the one before has left the buffer, so only the last one is still there."""
    params = tensors()
    parameters, fragments, _ = joined(params)
    largest = max(fragment.size for fragment in fragments.fragments)
    copies = [parameters.snapshot(fragment) for fragment in fragments.fragments]
    arrived = [not bool(part.isnan().any()) for each in copies for part in each.parts]
    assert arrived == [True, True, False]
    [buffer] = parameters._transfers._buffers.values()
    assert buffer.values.numel() == largest


def test_a_copy_in_bfloat16_has_what_rounding_left_over() -> None:
    tensor = torch.ones(4, 4, dtype=torch.bfloat16)
    parameters, fragments, _ = joined({"a": tensor}, 1)
    [fragment] = fragments.fragments
    parameters.write(fragment, np.full(16, 1 + 3 * 2**-10, np.float32))
    assert (tensor == 1).all()
    copied = parameters.snapshot(fragment)
    tensor += 2**-7
    assert (copied.to_host() == np.float32(1 + 3 * 2**-10)).all()


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_version_is_written_as_into_tensors_of_the_host(alpha: float, keeps: bool) -> None:
    rng, of_device, of_host = np.random.default_rng(0), tensors(), tensors()
    (parameters, fragments, port), plain = joined(of_device), TorchParameters(of_host)
    plain.tensors(None)
    for fragment in fragments.fragments:
        theta, base, moved = (rng.normal(0, 1, fragment.size).astype(np.float32) for _ in range(3))
        offered = Offered(EncodedOffer(quantise(moved, 4), quantise(0.1 * moved, 8)), 4, None, 8)
        for each in (parameters, plain):
            each.write(fragment, theta, Baseline(base, offered) if keeps else None, alpha)
    for path, tensor in of_host.items():
        np.testing.assert_array_equal(of_device[path].numpy().view(np.uint32), tensor.numpy().view(np.uint32))
    assert port.sent
    assert all(torch.equal(memory, then) for memory, then in port.sent), "memory that a device may read yet is left alone"


def test_a_version_is_read_from_its_arrays_before_the_call_returns() -> None:
    params = tensors()
    parameters, fragments, _ = joined(params, 1)
    [fragment] = fragments.fragments
    places = [tensor.data_ptr() for tensor in params.values()]
    theta = np.arange(fragment.size, dtype=np.float32)
    parameters.write(fragment, theta)
    expected = theta.tolist()
    theta[:] = 0
    assert values_of(params, fragment) == expected
    assert [tensor.data_ptr() for tensor in params.values()] == places, "a captured graph knows the addresses"


def test_a_loss_is_that_of_its_step_though_the_next_one_is_written_to_its_tensor() -> None:
    parameters, _, port = joined(tensors())
    loss = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    number = parameters.number(loss)
    with torch.no_grad():
        loss.fill_(7.0)
    assert port.waits == []
    assert number() == 2.5
    assert parameters.number(3)() == 3.0
    assert parameters.number(np.float32(1.5))() == 1.5


def test_ranks_hand_over_their_rows_alone() -> None:
    from diloco.core.tensors.rows import FragmentRows

    params = {"weight": torch.arange(12.0).reshape(4, 3)}
    rows = TensorRows(params, transfers=Transfers(LatePort()))
    [fragment] = build_map(rows.specs(None, ""), 1).fragments
    [piece] = fragment.pieces
    copied = rows.read_rows(fragment, FragmentRows(((piece, ()),)))
    params["weight"] += 1
    assert copied.to_host(np.zeros(12, np.float32)).tolist() == list(range(12))
    nothing = rows.read_rows(fragment, FragmentRows(()))
    assert nothing.to_host(np.zeros(12, np.float32)).tolist() == [0.0] * 12


def test_a_fragment_that_has_no_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, fragments, port = joined(tensors())

    def no_room(count: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(port, "pinned", no_room)
    with pytest.raises(DilocoError, match="fragment 1: cpu has no room for a copy of its"):
        parameters.snapshot(fragments.fragments[1])


def test_a_step_while_a_graph_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(SettingsError, match=r"a CUDA graph is being captured, .* call run.step after graph.replay\(\)"):
        CudaPort().attach([torch.device("cuda", 0)])


def test_a_loop_on_a_late_device_ends_with_the_model_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a learner of the same run whose values are NumPy's; a torn offer would be another model, and a NaN refused."""
    port = LatePort()
    monkeypatch.setattr(joined_parameters, "Transfers", lambda: Transfers(port))
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer, data = torch.optim.AdamW(module.parameters(), 0.01), torch.randn(16, 6)

    def loop(run: Any) -> None:
        while not run.over:
            optimizer.zero_grad()
            loss = module(data).square().mean()
            loss.backward()
            optimizer.step()
            run.step(module, loss=loss)

    with VirtualRun({"tokens": 8192, "learners": 1, "round.steps": 8, "fragments.count": 4}) as virtual:
        virtual.add_loop("ann", loop, params=lambda: module, data="own", tokens=16)
        virtual.advance()
        values = {name.replace(".", "/"): value.detach() for name, value in module.named_parameters()}
        for fragment in virtual._member("ann").map.fragments:
            found = values_of(values, fragment)
            np.testing.assert_array_equal(np.array(found, np.float32), virtual.base("ann", fragment.index))
        assert virtual.accounts("ann").loss is not None
    assert port.attached
