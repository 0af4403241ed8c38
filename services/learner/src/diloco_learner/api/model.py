"""The model that a learner trains, independent of the framework: its steps, its fragments, its state.

:class:`diloco_learner.jax.island.Island` computes it with JAX, and :mod:`diloco_learner.pytorch` with PyTorch. The trainer's
thread calls everything here, and nothing waits for the device but what says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core.learner.delta import Baseline
from diloco.core.run import tape
from diloco.core.tensors.boxes import Box
from diloco.core.tensors.chunks import Chunk
from diloco.core.tensors.fragments import FixedSpec, Fragment, FragmentMap, TensorSpec
from diloco.core.tensors.rows import RowLayout
from diloco.errors import RunError, SettingsError
from diloco.member.peer import Layout
from diloco.states.state import Content
from diloco_learner.api.evaluation import Evaluation

Vector = NDArray[np.float32]

FINGERPRINT_VALUES = 64  # of each array
COPY_BYTES = 1 << 28  # of a device whose memory is unknown: copied at once in any case


@dataclass(frozen=True)
class Capture:
    """A model's state as of a boundary. If ``held``, no step or write may begin before all values are read."""

    content: Content
    held: bool


class Output(Protocol):
    """A step that was dispatched."""

    def wait(self) -> float:
        """Wait for the step to end; its loss, or NaN where loss or gradients were not finite and no step was taken."""

    def metric_values(self) -> dict[str, float]:
        """Wait for the step to end; the task's own metrics."""

    def gradient_norm(self) -> float:
        """Wait for the step to end; the norm of all gradients together, before clipping."""


@runtime_checkable
class CountedOutput(Protocol):
    """A step whose loss may count its tokens, beside :class:`Output`."""

    def tokens(self) -> int | None:
        """Wait until the tokens are known that the loss counts, which may be before the step's end; None: it does not say.

        Raises:
            SettingsError: it counts more than ``tokens_per_batch``, or no whole number.
        """


def counted_tokens(output: Output, most: int) -> int:
    """Wait until the tokens of a step are known, and return them: those that its loss counts, or the ``most`` of a step.

    Raises:
        SettingsError: the loss counts what cannot be.
    """
    counted = output.tokens() if isinstance(output, CountedOutput) else None
    return most if counted is None else counted


def rehearsed_loss(output: Output) -> float:
    """Wait for a step that is rehearsed, on the first batch of share 0, and return its loss as :meth:`Output.wait` does.

    Raises:
        SettingsError: the loss counts what cannot be, or nothing: no step is taken then, and its arrays are not known.
    """
    loss, counted = output.wait(), output.tokens() if isinstance(output, CountedOutput) else None
    if counted == 0:
        raise SettingsError(
            "task: loss() counts no token in the first batch of share 0, by which a step is rehearsed: begin with a batch in "
            "which some label counts"
        )
    return loss


class FragmentCopy(Protocol):
    """A fragment's values at the time of the read, still on the device or on the host."""

    @property
    def is_on_host(self) -> bool:
        """Whether the values are on the host already."""

    def to_host(self, out: Vector | None = None) -> Vector:
        """Wait for the values, and return them as float32 [size of the fragment], in ``out`` if given. From any thread."""


class SharedParameters(Protocol):
    """Parameters into which versions are written and from which offers are read: of a model, or of a user's loop."""

    def write(self, fragment: Fragment, theta: Vector, reference: Baseline | Vector | None = None, alpha: float = 0.0) -> None:
        """Queue ``alpha * value + (1 - alpha) * kept``, where ``kept`` is ``theta + (value - reference)``, else ``theta``.

        Without ``reference`` and ``alpha`` the value becomes ``theta`` whatever it was, NaN too. Both are float32 [size of the
        fragment], and made of values that must not change until the next step has ended.
        """

    def snapshot(self, fragment: Fragment) -> FragmentCopy:
        """Queue a copy of what an offer of a fragment is made of."""


class LoopRanks(Protocol):
    """The processes of a loop that form one learner: ranks of its framework, by number."""

    rank: int
    count: int

    @property
    def software(self) -> dict[str, str]:
        """The versions that must be equal on all ranks."""

    def address(self) -> str:
        """Return HOST:PORT at which this rank, the first one, is reached by the others.

        Raises:
            SettingsError: it cannot be found out.
        """

    def joining(self, silent_s: float) -> AbstractContextManager[None]:
        """Return a context in which a rank that gives no sign of life for so long is taken as lost."""

    def check(self) -> None:
        """Look for signs of life of all ranks that join.

        Raises:
            IslandError: one was lost.
        """

    def exchange(self, stage: str, said: bytes, within_s: float) -> list[bytes]:
        """Send a message to all other ranks, and return the messages by rank.

        Raises:
            IslandError: some have said nothing in time, or one was lost while the ranks join.
        """

    def tell(self, stage: str, said: bytes) -> None:
        """Send a message from the first rank to all others."""

    def hear(self, stage: str, within_s: float) -> bytes:
        """Return the message of the first rank.

        Raises:
            IslandError: it has told nothing in time.
        """


class RankedParameters(SharedParameters, Protocol):
    """A rank's part of a loop's parameters."""

    @property
    def ranks(self) -> LoopRanks:
        """The ranks."""

    def boxes(self) -> dict[str, Box]:
        """Return this rank's part of each tensor, by path."""

    def deal(self, layouts: Sequence[RowLayout]) -> None:
        """Read, from now on, only the rows that the layouts, by fragment, deal to this rank."""


class JoinedParameters(SharedParameters, Protocol):
    """The parameters of a user's loop: the ``params`` of ``diloco.join``."""

    @property
    def ranked(self) -> RankedParameters | None:
        """These, if they are what one rank of several has; None: this process has all of them."""

    @property
    def tree(self) -> Any:
        """The parameters, as they were handed over."""

    def tensors(self, said: object) -> list[TensorSpec]:
        """Return each array as the log has it; ``said`` may have the task API's ``tensor``.

        Raises:
            SettingsError: it says what cannot be.
        """

    def fixed(self) -> list[FixedSpec]:
        """Return the parameters that are frozen, with their hashes; all learners of a run have the same."""

    def take(self, params: Any) -> None:
        """Take over the values of the same model; its arrays may be other ones than before.

        Raises:
            SettingsError: an array is missing, new, of another shape or type, or shares memory with another one.
        """

    def swapped(self, values: Any) -> AbstractContextManager[None]:
        """Return a ``with`` statement in which the arrays hold other values, in place.

        Raises:
            SettingsError: they are not those of all arrays, or the arrays are not written in place.
        """

    def fingerprint(self) -> str:
        """Return a hash of a few values of each array here: values that a step has changed have another one."""

    def shown(self, array: NDArray[Any]) -> Any:
        """Return an array of the host, any dtype [...], in the same memory, as users of the framework save it."""

    def rests(self) -> dict[str, Any]:
        """Return by path what rounding has left over of each array that has fewer digits than the log, spread as it is."""

    def put_rests(self, rests: Mapping[str, Any]) -> None:
        """Take over what :meth:`rests` gave.

        Raises:
            SettingsError: it is of other arrays, or spread in another way.
        """

    def sample(self) -> Any:
        """Return a number that is finite if the values of the smallest array are, which may be on its way from a device."""

    def number(self, scalar: Any) -> Callable[[], float]:
        """Have a scalar of any framework on its way to the host; return a function that waits for it and returns it."""


class Stepping(SharedParameters, Protocol):
    """A model that a trainer steps."""

    @property
    def device(self) -> str:
        """Its device or devices, in words."""

    def device_bytes(self) -> int | None:
        """Return the memory in use on its devices here; None where it is not known. From any thread."""

    @property
    def apart(self) -> bool:
        """Whether a step is two programs: :meth:`finish_step` dispatches the second."""

    def begin_step(self, batch: Any, learning_rate: float, at: tuple[int, int] = (0, 0)) -> Output:
        """Dispatch a step on the batch ``at`` a share and an index in it, or its first program."""

    def finish_step(self) -> None:
        """Dispatch the second program of the step that was begun, if there is one."""


class SavedModel(Protocol):
    """A model whose state is saved, lent and loaded: arrays by name, in chunks."""

    def capture(self, *, optimizer_only: bool = False) -> Capture:
        """Return the state as of the steps and writes so far, or the optimizer's alone."""

    def wanted(self, *, optimizer_only: bool = False) -> list[Chunk]:
        """Return the chunks that :meth:`put` takes, in any order."""

    def put(self, chunk: Chunk, values: NDArray[Any]) -> None:
        """Write a chunk of :meth:`wanted`: ``values``, any dtype [its lengths]."""

    def optimizer_layout(self) -> Layout:
        """Return names, shapes and types of the optimizer state."""

    def forget_optimizer(self) -> None:
        """Begin with a fresh optimizer state."""

    def check_state(self, state: Mapping[str, Chunk]) -> None:
        """Check that a state of these arrays, by name, is one of this model.

        Raises:
            RunError: an array is missing, not known, or of another shape or type.
        """


class SharedModel(Stepping, SavedModel, Protocol):
    """One process's part of a model that is spread over several processes."""

    def read(self, fragment: Fragment) -> FragmentCopy:
        """Queue a copy of a fragment's values with this process's rows, as of the steps and writes so far."""

    def deal_rows(self, fragments: Sequence[Fragment], carriers: Sequence[int]) -> list[RowLayout]:
        """Return by fragment which rows each process of this learner has, and which it hands over from now on.

        All processes return the same. ``carriers``: by fragment, the process that puts it together.
        """

    def optimizer_owners(self) -> Mapping[str, Sequence[tuple[int, Chunk]]]:
        """Return by array of the optimizer state, which process captures which chunk of it; all processes return the same."""


class Evaluated(SharedParameters, Protocol):
    """A model that an evaluator evaluates."""

    @property
    def task(self) -> object:
        """The task that it is of."""

    def evaluation(self) -> Evaluation:
        """Return how good the model is, by all that the task has to say it."""

    def check_evaluation(self) -> None:
        """Check that validation sets and values of the task's own are what they can be.

        Raises:
            SettingsError: they are not.
        """

    def sample(self, seed: int, count: int, prompt: str | None = None) -> str | None:
        """Return text of ``count`` characters from the model, behind a ``prompt`` if given; None if the task draws none."""


class Model(Stepping, SavedModel, Evaluated, Protocol):
    """Everything that a learner or evaluator of one process needs."""

    def read(self, fragment: Fragment) -> FragmentCopy:
        """Queue a copy of a fragment's values, as of the steps and writes so far."""

    def specs(self) -> list[TensorSpec]:
        """Return the tensors that are in the log, state among them."""

    def fragments(self) -> FragmentMap:
        """Return the fragments that the run cuts the model into."""

    def check(self, batch: Any) -> None:
        """Check that the task's loss of a batch is one number that can be differentiated.

        Raises:
            SettingsError: it is something else.
        """

    def rehearse(self, batch: Any) -> float:
        """Take a step that changes nothing, so that the first one takes no longer than others; return as :meth:`Output.wait`.

        Raises:
            SettingsError: the task's code, or its optimizer, is not as a step needs it.
        """

    def measured(self, batch: Any) -> tuple[float, list[str]]:
        """Return a batch's loss, finite or not, and the paths of the tensors whose gradients are not finite."""


def fingerprint_of(values: Iterable[NDArray[Any]]) -> str:
    """Return a hash of arrays, any dtype [...], in their order."""
    digest = blake3()
    for each in values:
        digest.update(np.ascontiguousarray(each, np.float32).tobytes())
    return digest.hexdigest()


def parameters_digest(model: Model, fragment_map: FragmentMap) -> bytes:
    """Return the digest of the parameters as of the steps and writes so far; wait for the device."""
    return digest_of(fragment_map, lambda index: model.read(fragment_map.fragments[index]).to_host())


def digest_of(fragment_map: FragmentMap, read: Callable[[int], Vector]) -> bytes:
    """Return the digest of parameters; ``read`` gives a fragment, float32 [size], by its index."""
    indexes = [fragment.index for fragment in fragment_map.fragments]
    return tape.state_digest({str(index): blake3(read(index).tobytes()).digest() for index in indexes})


def compare_states(own: Mapping[str, Chunk], state: Mapping[str, Chunk]) -> None:
    """Check that a state, its whole arrays by name, has the ones of this model.

    Raises:
        RunError: an array is missing, not known, or of another shape or type.
    """
    for name in sorted(own.keys() | state.keys()):
        if name not in state or name not in own:
            raise RunError(f"checkpoint: array {name!r} is {'missing' if name in own else 'not in this model'}")
        if state[name] != own[name]:
            raise RunError(
                f"checkpoint: array {name!r} has shape {state[name].shape} of {state[name].dtype}, this model's has "
                f"{own[name].shape} of {own[name].dtype}"
            )
