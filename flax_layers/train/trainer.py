"""A model in training: its parameters, its optimizer, and their compiled step."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float32, Int32

from flax_layers.models import Decoder, ModelConfig
from flax_layers.models.checkpoint.optional import needs
from flax_layers.models.sharding import RULES, Rules, automatic_mesh, parameter_shardings
from flax_layers.train import parallel
from flax_layers.train.dataset.corpus import Rows
from flax_layers.train.errors import InputError
from flax_layers.train.loss import next_token_weights, summed_cross_entropy
from flax_layers.train.optimizer import REMAT, Recipe, trained_paths
from jflex import context_parallel
from jflex.context_parallel import STRATEGIES

with needs("optax", "train"):
    import optax

EMBEDDING = "embed.embedding"

Value = TypeVar("Value")

Parameters = dict[str, Array]
"""By their paths, as `blocks.0.mlp.up.kernel`."""


class PlacedRows(NamedTuple):
    """`Rows` on devices."""

    tokens: Int32[Array, "*parts B T"]
    documents: Int32[Array, "*parts B T"] | None
    weights: Float32[Array, "*parts B T"] | None = None

    def loss_weights(self) -> Float32[Array, "*parts B T"]:
        """The weight of the loss of each token."""
        documents = jnp.zeros_like(self.tokens) if self.documents is None else self.documents
        return next_token_weights(documents, self.weights)


class State(NamedTuple):
    """The state of training, and the content of a checkpoint."""

    step: Int32[Array, ""]
    """Steps taken so far."""
    parameters: Parameters
    """In float32; frozen ones too."""
    optimizer: Any
    """The state of optax, of the trained parameters."""


class Metrics(NamedTuple):
    """Metrics of a step, before its update: arrays on the device that may not be ready yet."""

    loss: Float32[Array, ""]
    """Nats for each scored token: their mean, by their weights."""
    gradient_norm: Float32[Array, ""]
    """Before clipping."""
    learning_rate: Float32[Array, ""]


@dataclasses.dataclass(frozen=True)
class Computation:
    """The computation of a step; it changes the result only by rounding.

    Attributes:
        accumulate: Micro-batches of a step, computed one after the other.
        remat: What the backward pass recomputes: a name in `flax_layers.train.optimizer.REMAT`.
        loss_chunk: Tokens whose logits a device holds at a time.
        context_strategy: How the devices of `context` meet the keys of others, as in
            `jflex.context_parallel_attention`.
        context_order: The order of the tokens of a row among them, in `flax_layers.train.parallel.ORDERS`: `zigzag`
            gives all the same share of a causal mask.
    """

    accumulate: int = 1
    remat: str = "none"
    loss_chunk: int = 4096
    context_strategy: str = "all_gather"
    context_order: str = "zigzag"

    def __post_init__(self):
        if self.accumulate < 1 or self.loss_chunk < 1:
            raise InputError(
                f"`accumulate` and `loss_chunk` must be at least 1. Got {self.accumulate} and {self.loss_chunk}."
            )
        names = {"remat": REMAT, "context_order": parallel.ORDERS, "context_strategy": STRATEGIES}
        for field, known in names.items():
            if getattr(self, field) not in known:
                raise InputError(f"`{field}` must be one of {', '.join(known)}. Got {getattr(self, field)!r}.")


class Trainer:
    """Trains a decoder on one device or on a mesh of them.

    Args:
        model: With float32 parameters. The trainer donates them: use its `model()` afterwards. Of a model that
            `nnx.eval_shape` made, nothing is allocated until `begin`, or a state that is set.
        recipe: The optimizer and its schedule.
        computation: How a step is computed.
        mesh: With the axes `data`, `fsdp` and `model`, and `context` to divide the tokens of rows; explicit axes become
            automatic. Default: the first device.
        rules: How parameters are sharded over it.
        trained: Patterns of the paths of parameters that are trained, such as `*.attention.*`. The others have no
            gradients and no moments. Default: all.

    Raises:
        InputError: The trained parameters are narrower than float32, the mesh lacks an axis, or a pattern matches none.
        ValueError: The mesh does not divide the model.

    Example:
        >>> from flax_layers.models import LayerConfig, ModelConfig
        >>> config = ModelConfig(
        ...     vocabulary=16, width=8, mlp_width=16, num_heads=2, num_kv_heads=1, head_dim=4, layers=(LayerConfig(),),
        ...     max_positions=8,
        ... )
        >>> trainer = Trainer(Decoder(config, rngs=nnx.Rngs(0)), Recipe(steps=30, learning_rate=0.03))
        >>> rows = Rows(np.arange(16).reshape(2, 8), np.zeros((2, 8), int))
        >>> losses = [float(trainer.step(rows).loss) for _ in range(30)]
        >>> losses[-1] < losses[0] / 2
        True
    """

    @parallel.outside_of_meshes
    def __init__(
        self,
        model: Decoder,
        recipe: Recipe,
        computation: Computation = Computation(),
        *,
        mesh: Mesh | None = None,
        rules: Rules = RULES,
        trained: Sequence[str] | None = None,
    ):
        self.config = model.config
        self._dtype = model.embed.dtype
        self.computation = computation
        self.mesh = parallel.make_mesh(dict.fromkeys(parallel.AXES, 1)) if mesh is None else automatic_mesh(mesh)
        if not set(parallel.AXES) <= set(self.mesh.shape):
            raise InputError(
                f"`mesh` must have the axes {', '.join(parallel.AXES)}. Got {', '.join(self.mesh.shape)}. Make it with "
                "`flax_layers.train.make_mesh`, or add axes of size 1."
            )
        self._context = parallel.context_of(self.mesh, computation.context_strategy, computation.context_order)
        form, variables = nnx.split(model)
        shells = [(path, leaf.replace(None)) for path, leaf in nnx.to_flat_state(variables)]
        self._merged = functools.partial(_merged, form, shells)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), flat_parameters(variables))
        self.trained = trained_paths(shapes, trained)
        _check_float32(self._trained(shapes))
        shardings = shardings_of(shapes, self.config, self.mesh, rules)
        optimizer = recipe.optimizer()
        moments = jax.eval_shape(optimizer.init, self._trained(shapes))
        whole = parallel.placed(self.mesh)
        by_optimizer = optax.tree_map_params(
            optimizer,
            lambda _, sharding: sharding,
            moments,
            self._trained(shardings),
            transform_non_params=lambda _: whole,
        )
        self.shardings: Any = State._make((whole, shardings, by_optimizer))
        self.state: State = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            State._make((jax.ShapeDtypeStruct((), jnp.int32), shapes, moments)),
            self.shardings,
        )
        self._init = jax.jit(optimizer.init, out_shardings=by_optimizer)
        take = functools.partial(self._take_step, optimizer, recipe.schedule())
        self._step = jax.jit(take, donate_argnums=0, out_shardings=(self.shardings, whole))
        self._sums = jax.jit(self._loss_sums, out_shardings=whole)
        if all(isinstance(x, jax.Array) for x in flat_parameters(variables).values()):
            self.begin(model)

    @parallel.outside_of_meshes
    def begin(self, model: Decoder) -> None:
        """Sets the state to that before the first step, with the parameters of a model."""
        parameters = jax.device_put(flat_parameters(nnx.state(model)), self.shardings.parameters)
        with jax.numpy_dtype_promotion("standard"):
            optimizer = self._init(self._trained(parameters))
        self.state = State(jax.device_put(jnp.int32(0), self.shardings.step), parameters, optimizer)

    @parallel.outside_of_meshes
    def compile(
        self, rows: int, length: int, *, has_documents: bool = True, has_weights: bool = False
    ) -> jax.stages.Compiled:
        """Compiles the step for batches of `rows`; `step` then compiles nothing. Nothing else is allocated."""
        shape = (self.computation.accumulate, rows // self.computation.accumulate, length)
        sharding = parallel.placed(self.mesh, None, parallel.ROWS[0])
        documents, weights = np.int32 if has_documents else None, np.float32 if has_weights else None
        dtypes = PlacedRows._make((np.int32, documents, weights))
        batch = jax.tree.map(lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), dtypes)
        return self._step.lower(self.state, batch).compile()

    @parallel.outside_of_meshes
    def step(self, rows: Rows) -> Metrics:
        """Takes a step on a batch. It returns at once; reading the metrics waits for the device.

        Raises:
            InputError: The micro-batches and the mesh do not divide the rows.
        """
        parts = self.computation.accumulate
        self._check_rows(rows, parts)
        split = jax.tree.map(lambda array: array.reshape(parts, -1, array.shape[-1]), rows)
        self.state, metrics = self._step(self.state, self._on_devices(split, None, parallel.ROWS[0]))
        return metrics

    @parallel.outside_of_meshes
    def mean_loss(self, batches: Iterable[Rows]) -> float:
        """Mean loss of all scored tokens of the batches, in nats.

        Raises:
            InputError: There is no batch, or the mesh does not divide the rows of one.
        """
        sums = []
        for rows in batches:
            self._check_rows(rows, 1)
            sums.append(self._sums(self.state.parameters, self._on_devices(rows, parallel.ROWS[0])))
        if not sums:
            raise InputError("`batches` must hold a batch. It is empty. Pass a list, or make the generator again.")
        total, count = np.sum([[float(part) for part in pair] for pair in sums], axis=0)
        return float(total / (count or 1.0))

    def model(self) -> Decoder:
        """The model with the current parameters; the next step invalidates them."""
        return self._merged(self.state.parameters)

    def _check_rows(self, rows: Rows, parts: int) -> None:
        count, shards = len(rows.tokens), parallel.row_shards(self.mesh)
        if count % (parts * shards):
            raise InputError(
                f"`rows` must be a multiple of the micro-batches, {parts}, times data * fsdp, {shards}. Got {count}. "
                "Change the batch, the mesh or `Computation.accumulate`."
            )
        parallel.check_length(self.mesh, rows.tokens.shape[-1], self.computation.context_order)

    def _trained(self, by_path: dict[str, Value]) -> dict[str, Value]:
        return {path: value for path, value in by_path.items() if path in self.trained}

    def _on_devices(self, rows: Rows, *spec: Any) -> PlacedRows:
        sharding = parallel.placed(self.mesh, *spec)
        dtypes = np.int32, np.int32, np.float32
        arrays = [None if x is None else np.asarray(x, dtype) for x, dtype in zip(rows, dtypes, strict=True)]
        return PlacedRows._make(jax.device_put(arrays, sharding))

    def _take_step(
        self, optimizer: optax.GradientTransformation, schedule: optax.Schedule, state: State, rows: PlacedRows
    ) -> tuple[State, Metrics]:
        """Compiled: gradients of all micro-batches, and one update."""
        count = jnp.sum(rows.loss_weights())
        count = jnp.where(count > 0, count, 1)
        trained = self._trained(state.parameters)
        shardings = self._trained(self.shardings.parameters)
        part_loss = lambda trained, part: self._loss_sums(state.parameters | trained, part)[0] / count

        def differentiate(part):
            loss, gradients = jax.value_and_grad(part_loss)(trained, part)
            return loss, jax.lax.with_sharding_constraint(gradients, shardings)

        if self.computation.accumulate == 1:
            loss, gradients = differentiate(jax.tree.map(lambda array: array[0], rows))
        else:
            add = lambda sums, part: (jax.tree.map(jnp.add, sums, differentiate(part)), None)
            start = jnp.float32(0), jax.tree.map(jnp.zeros_like, trained)
            (loss, gradients), _ = jax.lax.scan(add, start, rows)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes counts with floats
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, trained)
            updated: Any = optax.apply_updates(trained, updates)
            metrics = Metrics(loss, optax.tree.norm(gradients), jnp.float32(schedule(state.step)))
        return State(state.step + 1, state.parameters | updated, optimizer_state), metrics

    def _loss_sums(self, parameters: Parameters, rows: PlacedRows) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
        """Summed cross entropy of rows, and the sum of the weights of their tokens."""
        model = self._merged(self._as_used(parameters))
        targets, weights = jnp.roll(rows.tokens, -1, axis=1), rows.loss_weights()
        tokens, targets, weights = map(self._divided, (rows.tokens, targets, weights))
        hidden = model.hidden(
            tokens,
            rows.documents,
            remat=REMAT[self.computation.remat](),
            constrain=self._along_tokens,
            context=self._context,
        )
        loss = functools.partial(
            summed_cross_entropy, chunk=self.computation.loss_chunk, softcap=self.config.logits_softcap
        )
        return self._over_shards(loss, hidden, model.head_kernel(), targets, weights), jnp.sum(weights)

    def _along_tokens(self, x: Array) -> Array:
        """Sets the sharding of an array of rows and tokens."""
        axes = parallel.ROWS if self._context is None else (*parallel.ROWS, parallel.CONTEXT)
        return jax.lax.with_sharding_constraint(x, parallel.placed(self.mesh, *axes))

    def _divided(self, x: Array) -> Array:
        """Puts the tokens of rows in the order of the devices. All devices have all tokens, so nothing is sent."""
        if self._context is None:
            return x
        order = self._context.order
        return self._along_tokens(x if order is None else context_parallel.reorder(x, np.array(order)))

    def _as_used(self, parameters: Parameters) -> Parameters:
        """Kernels in the dtype of the computation, so that they are all-gathered in it; embeddings sharded by rows."""
        shardings, used = self.shardings.parameters, dict(parameters)
        for path, value in parameters.items():
            if re.fullmatch(r"blocks\..*\.kernel", path):
                used[path] = jax.lax.with_sharding_constraint(value.astype(self._dtype), shardings[path])
        # Sharded along both axes, a lookup would gather the rows of all devices.
        used[EMBEDDING] = jax.lax.with_sharding_constraint(parameters[EMBEDDING], parallel.placed(self.mesh, "model"))
        return used

    def _over_shards(self, loss: Callable[..., Array], hidden: Array, kernel: Array, *of_tokens: Array) -> Array:
        """The loss of each shard of rows and tokens, so that gradients of the kernel are summed over shards once."""
        shards, parts = parallel.row_shards(self.mesh), parallel.context_shards(self.mesh)
        names = parallel.ROWS[0] if self._context is None else (*parallel.ROWS[0], parallel.CONTEXT)
        along_shards = parallel.placed(self.mesh, names)

        def cut(array):
            cut = array.reshape(shards, -1, parts, array.shape[1] // parts, *array.shape[2:]).swapaxes(1, 2)
            return jax.lax.with_sharding_constraint(cut.reshape(shards * parts, *cut.shape[2:]), along_shards)

        kernel = jax.lax.with_sharding_constraint(kernel, parallel.placed(self.mesh, None, "model"))
        over = jax.vmap(loss, in_axes=(0, None, 0, 0), spmd_axis_name=names)
        return jnp.sum(over(cut(hidden), kernel, *map(cut, of_tokens)))


def create_model(build: Callable[[], Decoder], mesh: Mesh | None = None, rules: Rules = RULES) -> Decoder:
    """Makes a model whose parameters are initialized sharded, as by `Trainer`; no device ever holds all of them."""
    mesh = parallel.make_mesh(dict.fromkeys(parallel.AXES, 1)) if mesh is None else mesh
    shape = nnx.eval_shape(build)
    form, variables = nnx.split(shape)
    shardings = shardings_of(flat_parameters(variables), shape.config, mesh, rules)
    draw = lambda: flat_parameters(nnx.state(build()))
    if mesh.size == 1:  # compiles one draw for each shape: 16 layers on a CPU take 4 s, and 21 in one program
        with jax.default_device(mesh.devices.item()):
            drawn = jax.device_put(draw(), shardings)
    else:
        drawn = jax.jit(draw, out_shardings=shardings)()
    return _merged(form, nnx.to_flat_state(variables), drawn)


def flat_parameters(variables: nnx.State) -> Parameters:
    """The parameters of a model by their paths."""
    return {_name(path): leaf.get_value() for path, leaf in nnx.to_flat_state(variables)}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of a model without score mods, by their paths. Nothing is allocated."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return {path: value.shape for path, value in flat_parameters(nnx.state(model)).items()}


def shardings_of(parameters: Parameters, config: Any, mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
    """The sharding of each parameter."""
    shapes = {path: value.shape for path, value in parameters.items()}
    return parameter_shardings(shapes, mesh, rules, num_kv_heads=config.num_kv_heads)


def _check_float32(parameters: Parameters) -> None:
    """Raises where updates would be rounded away: parameters and moments would have a narrow dtype."""
    narrow = sorted({str(value.dtype) for value in parameters.values() if value.dtype.itemsize < 4})
    if narrow:
        raise InputError(
            f"`model` must have float32 parameters to train. Got {', '.join(narrow)}. Pass `param_dtype=jnp.float32` "
            "to `from_pretrained` or `Decoder`; `dtype` is that of the computation."
        )


def _merged(form: nnx.GraphDef, variables: Iterable[tuple[Any, Any]], parameters: Parameters) -> Decoder:
    leaves = [(path, leaf.replace(parameters[_name(path)])) for path, leaf in variables]
    return nnx.merge(form, nnx.from_flat_state(leaves))


def _name(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))
