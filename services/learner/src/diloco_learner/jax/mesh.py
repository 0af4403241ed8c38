"""The mesh of a learner's devices, and where its arrays lie on it.

A mesh has three axes. Rows of a batch are split over ``data`` and ``fsdp``. A tensor is split as its task's
``partition(path, shape)`` says, by default along its largest axis that ``fsdp`` divides (fully sharded data parallelism,
arXiv 2304.11277); small tensors are whole on every device. Optimizer state is split like the tensor that it belongs to.
XLA adds the collectives that a step needs (GSPMD, arXiv 2105.04663), so a partition changes where numbers are, and not which.

On one device there is no mesh, and none of this is in the programs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, explicit_axes, use_abstract_mesh
from numpy.typing import NDArray

from diloco.errors import SettingsError
from diloco.settings.service import MeshSettings
from diloco_learner.jax.leaves import path_of
from diloco_learner.jax.tree import Described, ModelTree
from diloco_learner.task import Task, check_alike, rows_of
from diloco_learner.tensors import tensor_of

Params: TypeAlias = Any  # the task's pytree of parameters
Shape: TypeAlias = tuple[int, ...]
Leaves: TypeAlias = list[jax.Array]  # the parameters, in their order

AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec(("data", "fsdp"))  # of a batch
CONSTANTS = "constants/"  # begins the paths of constants
SMALL_VALUES = 4096  # 16 KiB: to gather a tensor at every step takes longer than its memory is worth


def make_mesh(settings: MeshSettings, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """Return the mesh of all devices of this learner's processes (or of those given); None for a single one.

    Raises:
        SettingsError: the axes do not fit their number.
    """
    found = jax.devices() if devices is None else list(devices)
    sizes = axis_sizes(settings, len(found), found[0].platform)
    if len(found) == 1:
        return None
    return Mesh(np.array(found).reshape(*sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def axis_sizes(settings: MeshSettings, devices: int, platform: str) -> dict[str, int]:
    """Return the size of each axis of a mesh of this many devices of a platform.

    Raises:
        SettingsError: the axes do not fit their number.
    """
    sizes = settings.axes(devices)
    if math.prod(sizes.values()) != devices:
        left = "" if settings.fsdp else " (by default as many as are left)"
        raise SettingsError(
            f"mesh: mesh.data = {settings.data}, mesh.fsdp = {sizes['fsdp']}{left} and mesh.tensor = {settings.tensor} are "
            f"{math.prod(sizes.values())} devices, and JAX gives this learner {devices} ({platform}): change them, or the "
            "devices that it sees (CUDA_VISIBLE_DEVICES; JAX_NUM_CPU_DEVICES for a CPU)"
        )
    return sizes


def partition_of(path: str, shape: Shape, said: PartitionSpec | None, sizes: Mapping[str, int]) -> PartitionSpec:
    """Return how a tensor is split over a mesh, whose axes have these sizes; the task ``said`` so, or nothing.

    Raises:
        SettingsError: the task's partition names an axis that there is not, or splits one that the devices do not divide.
    """
    spec = said
    if spec is None:
        return default_partition(shape, sizes)
    if not isinstance(spec, PartitionSpec) or len(spec) > len(shape):
        raise SettingsError(
            f"task: the partition of {path!r} is {spec!r}, expected None or a jax.sharding.PartitionSpec of at most "
            f"{len(shape)} axes, as the tensor of shape {shape} has"
        )
    names = _names(spec)
    for name in names:
        if name not in AXES or names.count(name) > 1:
            wrong = "more than once" if name in AXES else (f"which is not an axis of the mesh: name {', '.join(AXES)} or None")
            raise SettingsError(f"task: the partition of {path!r} is {spec}: it names {name!r}, {wrong}")
    for axis, part in enumerate(spec):
        over = _names((part,))
        count = math.prod(sizes[name] for name in over)
        if shape[axis] % count:
            devices = " and ".join(f"mesh.{name} = {sizes[name]}" for name in over)
            raise SettingsError(
                f"task: the partition of {path!r} is {spec}: its axis {axis} has {shape[axis]} entries, which {devices} "
                "does not divide: name None for this axis, split another one, or set the mesh so that it divides"
            )
    return spec


def default_partition(shape: Shape, sizes: Mapping[str, int]) -> PartitionSpec:
    """Return ``fsdp`` for the largest axis that it divides, the first of several; nothing for a small tensor."""
    fsdp = sizes["fsdp"]
    fitting = [axis for axis, length in enumerate(shape) if length % fsdp == 0]
    if fsdp == 1 or math.prod(shape) < SMALL_VALUES or not fitting:
        return PartitionSpec()
    split = max(fitting, key=lambda axis: (shape[axis], -axis))
    return PartitionSpec(*(None,) * split, "fsdp")


def stored_partition(tensor: Described, spec: PartitionSpec, sizes: Mapping[str, int]) -> PartitionSpec:
    """Return how a tensor's master is split: along the axes along which the task's own is, where it has these apart."""
    kept = tensor.arrangement
    if kept is None:
        return spec
    axes = (*spec, *(None,) * (len(kept.shape) - len(spec)))
    ordered = [axes[axis] for axis in kept.order]
    rows, columns = ordered[: len(kept.outputs)] or [None], ordered[len(kept.outputs) :]
    if any(part is not None for part in (*rows[1:], *columns[1:])):
        return default_partition(kept.stored_shape, sizes)
    return PartitionSpec(rows[0], columns[0])


def shapes_of(task: Task, key: Any) -> Any:
    """Return a task's parameters without values: shapes and types in its tree."""
    return jax.eval_shape(task.init, key)


def partitions(task: object, tree: ModelTree, sizes: Mapping[str, int]) -> list[PartitionSpec]:
    """Return how all tensors of a model are split, as the task has them.

    Raises:
        SettingsError: a partition of the task does not fit the mesh, or none uses an axis of it.
    """
    specs = [partition_of(each.path, each.shape, each.tensor.partition, sizes) for each in tree.tensors]
    if sizes["tensor"] > 1 and not any("tensor" in _names(spec) for spec in specs):
        raise SettingsError(
            f"mesh.tensor = {sizes['tensor']}: no partition of task {type(task).__name__} names 'tensor', so these "
            "devices would all do the same work: name 'tensor' in the partition of a Tensor, or leave mesh.tensor out"
        )
    return specs


def check_rows(rows: int, sizes: Mapping[str, int]) -> None:
    """Check that the devices of a mesh divide the rows of a batch.

    Raises:
        SettingsError: they do not.
    """
    shards = _row_shards(sizes)
    if rows % shards:
        raise SettingsError(
            f"task: a batch has {rows} rows (rows_per_batch, or the first axis of its largest array), which mesh.data = "
            f"{sizes['data']} times mesh.fsdp = {sizes['fsdp']} does not divide: take a multiple of {shards} rows a batch "
            f"(task.batch of the built-in task), or a mesh that divides {rows}"
        )


def rows_on(mesh: Mesh, rows: int, devices: Collection[jax.Device]) -> range:
    """Return the rows of a batch, of so many, that some devices take: one range that has all of them."""
    places = NamedSharding(mesh, ROWS).devices_indices_map((rows,))
    bounds = [places[device][0].indices(rows) for device in devices]
    return range(min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds))


def rows_alone(batch: Any, rows: range, count: int) -> Any:
    """Return a whole batch of ``count`` rows with these alone; arrays of another first axis stay whole."""
    return jax.tree.map(lambda leaf: leaf[rows.start : rows.stop] if np.shape(leaf)[:1] == (count,) else leaf, batch)


class InnerOptimizer(Protocol):
    """An optimizer, as far as its state's place is concerned."""

    @property
    def paths(self) -> Sequence[tuple[Any, ...]]:
        """By tensor: the path of its values within those parts of the state that are like the parameters."""

    @property
    def sees_masters(self) -> bool:
        """Whether these parts are like masters, and not like the task's own tensors."""

    def init(self, leaves: Leaves, /) -> Any:
        """Return the state of an optimizer that begins."""


class Placement:
    """Where the arrays of an island lie: split over a mesh, or, without one, as JAX puts them on one device.

    Raises:
        SettingsError: a partition of the task does not fit the mesh, or none uses an axis of it.
    """

    def __init__(self, task: Task, mesh: Mesh | None, key: jax.Array) -> None:
        self.task, self.mesh, self._key = task, mesh, key
        self._batch_shapes: Any = None  # of whole batches, once one has been checked
        self._came: Any = None  # structure, shapes and types of the last batch that was trained on
        self._constant_specs: Any = None
        self._made = task.init(key) if mesh is None else shapes_of(task, key)
        self.tree = ModelTree(task, self._made)
        if mesh is None:
            return
        self._specs = partitions(task, self.tree, mesh.shape)  # of all tensors, as the task has them
        self._trained_specs, self._frozen_specs = self.tree.parts(self.tree.unflatten(self._specs))
        pairs = zip(self.tree.trained, self._trained_specs, strict=True)
        self._stored_specs = [stored_partition(each, spec, mesh.shape) for each, spec in pairs]

    def init(self) -> tuple[Leaves, list[jax.Array]]:
        """Return the task's first parameters: masters, and frozen tensors. It is to be called once.

        On a mesh each device makes its shards, so ``task.init`` is traced by JAX.
        """

        def copied(trained: list[Any], frozen: list[Any]) -> tuple[Leaves, list[jax.Array]]:
            # copies: what the task gave stays the task's, and is never donated
            return self.tree.masters(trained), [jnp.array(leaf, copy=True) for leaf in frozen]

        if self.mesh is None:
            trained, frozen = self.tree.parts(self._made)
            self._made = None
            return copied(trained, frozen)
        self._made = None
        places = self._shardings, self._places(self._frozen_specs)
        make = jax.jit(lambda key: copied(*self.tree.parts(self.task.init(key))), out_shardings=places)
        leaves: tuple[Leaves, list[jax.Array]] = make(self._key)
        return leaves

    def optimizer_init(self, optimizer: InnerOptimizer, leaves: Leaves) -> Callable[[Leaves], Any]:
        """Return a function that makes a fresh optimizer state, split like the parameters."""
        if self.mesh is None:
            return optimizer.init
        return jax.jit(optimizer.init, out_shardings=self._of_state(optimizer, leaves))

    def step(self, step: Callable[..., Any], optimizer: InnerOptimizer, leaves: Leaves, holds_gradients: bool) -> Any:
        """Return the jitted ``step(leaves, gradients held or None, optimizer state, task's state, batch, given, rate)``.

        It takes the first four for its own and returns them, split as they were, and scalars.
        """
        if self.mesh is None:
            return jax.jit(step, donate_argnums=(0, 1, 2, 3))
        returned = *self._moved(optimizer, leaves, holds_gradients), self._whole
        return jax.jit(step, donate_argnums=(0, 1, 2, 3), out_shardings=returned)

    def step_apart(
        self,
        measure: Callable[..., Any],
        move: Callable[..., Any],
        optimizer: InnerOptimizer,
        leaves: Leaves,
        holds_gradients: bool,
    ) -> tuple[Any, Any]:
        """Return the two programs of a step, jitted.

        ``measure(leaves, task's state, batch, given)`` returns gradients, split like the leaves, the state after the step, and
        scalars; it takes nothing for its own, so the leaves stay where it fails. ``move(leaves, gradients held, optimizer
        state, task's state, gradients, state after, finite, rate)`` is the rest of :meth:`step`.
        """
        if self.mesh is None:
            return jax.jit(measure), jax.jit(move, donate_argnums=(0, 1, 2, 3))
        moved = self._moved(optimizer, leaves, holds_gradients)
        measured = jax.jit(measure, out_shardings=(self._shardings, self._whole, self._whole))
        return measured, jax.jit(move, donate_argnums=(0, 1, 2, 3), out_shardings=moved)

    def count(self, count: Callable[..., Any]) -> Any:
        """Return the jitted ``count(leaves, task's state, batch, given)``, whose result is whole on every device."""
        return jax.jit(count) if self.mesh is None else jax.jit(count, out_shardings=self._whole)

    def measured(self, leaves: Leaves, state: Any) -> tuple[list[jax.ShapeDtypeStruct], Any, jax.ShapeDtypeStruct]:
        """Return what the second program of a step takes from the first: gradients, state, and whether all are finite."""
        whole = None if self.mesh is None else self._whole
        split = [None] * len(leaves) if self.mesh is None else self._shardings
        gradients = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at) for leaf, at in zip(leaves, split, strict=True)]
        after = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), state)
        return gradients, after, jax.ShapeDtypeStruct((), jnp.bool_, sharding=whole)

    def _moved(self, optimizer: InnerOptimizer, leaves: Leaves, holds_gradients: bool) -> tuple[Any, Any, Any, Any]:
        """Return how a step's results are split."""
        held = self._shardings if holds_gradients else None
        return self._shardings, held, self._of_state(optimizer, leaves), self._whole

    def state(self, make: Callable[[jax.Array], Any]) -> Any:
        """Return the state that a function makes of the run's key, whole on every device."""
        return make(self._key) if self.mesh is None else jax.jit(make, out_shardings=self._whole)(self._key)

    def constants(self, loaded: Any) -> Any:
        """Return a task's constants on the devices, each split as the task says or by default."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, loaded)
        mesh = self.mesh

        def spec(keys: Any, leaf: Any) -> PartitionSpec:
            path, shape = CONSTANTS + path_of(keys), tuple(leaf.shape)
            said = tensor_of(self.task, path, shape).partition if hasattr(self.task, "tensor") else None
            return partition_of(path, shape, said, mesh.shape)

        def put(leaf: Any, spec: PartitionSpec) -> jax.Array:
            values = np.asarray(leaf)
            return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])

        self._constant_specs = jax.tree_util.tree_map_with_path(spec, loaded)
        return jax.tree.map(put, loaded, self._constant_specs)

    def loss(self, params: Params, batch: Any, arrays: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
        """Return what the task's loss returns, traced with the mesh in force, with explicit axes where the task asks for them.

        Its keywords are ``arrays``, which are whole on every device but for constants, and ``others``.
        """
        function = functools.partial(self.task.loss, **others)
        if self.mesh is None:
            return function(params, batch, **arrays)
        with use_abstract_mesh(self.mesh.abstract_mesh):
            if getattr(self.task, "axes", "auto") == "explicit":
                whole = jax.tree.map(lambda _: PartitionSpec(), arrays)
                if "constants" in arrays:
                    whole["constants"] = self._constant_specs
                shardings = (self.tree.unflatten(self._specs), self._batch_specs(batch), whole)

                def with_keywords(params: Params, batch: Any, arrays: Mapping[str, Any]) -> Any:
                    return function(params, batch, **arrays)

                return explicit_axes(with_keywords, axes=AXES, in_sharding=shardings)(params, batch, arrays)
            return function(params, batch, **arrays)

    def split(self, values: Leaves) -> Leaves:
        """Return values split like the parameters that they are of: so no device adds up more of a gradient than its own."""
        return values if self.mesh is None else jax.lax.with_sharding_constraint(values, self._shardings)

    def batch(self, batch: Any) -> Any:
        """Return a batch with its rows on the devices that take them.

        Of a learner of several processes it may have no more than :attr:`own_rows`.

        Raises:
            SettingsError: it has neither these nor all.
        """
        if self.mesh is None:
            return batch
        mesh = self.mesh
        if not mesh.is_multi_process:
            return jax.device_put(batch, jax.tree.map(lambda spec: NamedSharding(mesh, spec), self._batch_specs(batch)))
        whole = self._batch_shapes
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self._batch_specs(whole))
        return jax.tree_util.tree_map_with_path(functools.partial(place, own=self.own_rows), batch, whole, shardings)

    @property
    def own_rows(self) -> range:
        """The rows of a batch that the devices of this process take, on a mesh; one was checked before."""
        assert self.mesh is not None
        return rows_on(self.mesh, rows_of(self.task, self._batch_shapes), self.mesh.local_devices)

    def check_batch(self, batch: Any) -> None:
        """Check that the devices divide the rows of a whole batch; all others have its shapes.

        Raises:
            SettingsError: they do not.
        """
        if self.mesh is not None:
            check_rows(rows_of(self.task, batch), self.mesh.shape)
        self._batch_shapes = jax.eval_shape(lambda whole: whole, batch)

    def check_alike(self, batch: Any) -> None:
        """Check that a batch has the arrays of the one that was checked: a step is compiled for these.

        A learner of several processes may have some rows of each, of which :meth:`batch` finds that out.

        Raises:
            SettingsError: it has others.
        """
        leaves, structure = jax.tree.flatten(batch)
        came = structure, [(np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves]
        if came == self._came:
            return
        if self._batch_shapes is not None and not (self.mesh is not None and self.mesh.is_multi_process):
            check_alike(self.task, self._batch_shapes, batch)
        self._came = came

    def _batch_specs(self, batch: Any) -> Any:
        assert self.mesh is not None
        rows = rows_of(self.task, batch)
        divides = rows % _row_shards(self.mesh.shape) == 0
        return jax.tree.map(lambda leaf: ROWS if divides and np.shape(leaf)[:1] == (rows,) else PartitionSpec(), batch)

    @property
    def _whole(self) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def _shardings(self) -> list[NamedSharding]:
        return self._places(self._stored_specs)

    def _places(self, specs: Sequence[PartitionSpec]) -> list[NamedSharding]:
        assert self.mesh is not None
        return [NamedSharding(self.mesh, spec) for spec in specs]

    def _of_state(self, optimizer: InnerOptimizer, leaves: Leaves) -> Any:
        """Return the shardings of an optimizer state: an array of a tensor is split like it, all else is whole.

        It is of a tensor if its path in the state ends with the tensor's own, and it has as many values.
        """
        mesh, index = self.mesh, {tuple(path): at for at, path in enumerate(optimizer.paths)}
        assert mesh is not None
        masters, trained = optimizer.sees_masters, self.tree.trained
        shapes = [each.stored_shape if masters else each.shape for each in trained]
        specs = self._stored_specs if masters else self._trained_specs

        def sharding(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            at = next((index[path[start:]] for start in range(len(path) + 1) if path[start:] in index), None)
            if at is None or math.prod(leaf.shape) != math.prod(shapes[at]):
                return self._whole
            return NamedSharding(mesh, _of_shape(specs[at], shapes[at], leaf.shape, mesh))

        return jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(optimizer.init, leaves))


def _of_shape(spec: PartitionSpec, own: Shape, shape: Shape, mesh: Mesh) -> PartitionSpec:
    """Return how a tensor's values are split that an optimizer holds in another shape, as Muon does: its matrices apart."""
    if shape == own:
        return spec
    split = (None,) * (len(shape) - len(own)) + tuple(spec)
    counts = [math.prod(mesh.shape[name] for name in _names((part,))) for part in split]
    if any(length % count for length, count in zip(shape, counts, strict=False)):
        return default_partition(shape, mesh.shape)
    return PartitionSpec(*split)


def copies(arrays: Leaves) -> Leaves:
    """Queue copies of arrays on their devices, split as they are."""
    if not arrays or len(arrays[0].sharding.device_set) == 1:
        copied: Leaves = _copy_all(arrays)
        return copied
    return _copy_in_places(tuple(array.sharding for array in arrays))(arrays)


def _copied(arrays: Leaves) -> Leaves:
    return [jnp.copy(array) for array in arrays]


_copy_all = jax.jit(_copied)


@functools.cache
def _copy_in_places(places: tuple[Sharding, ...]) -> Callable[[Leaves], Leaves]:
    # left to itself XLA names a sharding in another way than the step's arguments do, which would compile the step once more
    return jax.jit(_copied, out_shardings=list(places))


def place(path: Any, leaf: Any, whole: jax.ShapeDtypeStruct, sharding: NamedSharding, *, own: range) -> jax.Array:
    """Return an array of all processes of which this one puts what its devices take; the others are not asked.

    ``leaf`` is the whole array, or where rows are split this process's ``own`` ones.
    """
    values, split = np.asarray(leaf), sharding.spec == ROWS
    alone = split and values.shape == (len(own), *whole.shape[1:])
    if not alone and values.shape != whole.shape:
        name = path_of(path) or "the batch"
        raise SettingsError(
            f"task: batches() gave {name} as {list(values.shape)}, expected {list(whole.shape)}, or rows {own.start} to "
            f"{own.stop - 1} of it: batches have the same shapes each time"
        )
    first = own.start if alone else 0

    def here(index: tuple[slice, ...] | None) -> NDArray[Any]:
        assert index is not None
        return values[shifted(index, whole.shape, first)]

    return jax.make_array_from_callback(whole.shape, sharding, here)


def shifted(index: tuple[slice, ...], shape: Shape, first: int) -> tuple[slice, ...]:
    """Return where a part of an array is in one that begins with the array's ``first`` row."""
    if not first:
        return index
    start, stop, _ = index[0].indices(shape[0])
    return slice(start - first, stop - first), *index[1:]


def _row_shards(sizes: Mapping[str, int]) -> int:
    return sizes["data"] * sizes["fsdp"]


def _names(spec: Iterable[Any]) -> list[str]:
    """Return the mesh's axes that a partition names."""
    return [name for part in spec if part is not None for name in (part if isinstance(part, tuple) else (part,))]
