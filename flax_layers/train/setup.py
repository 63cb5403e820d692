"""Builds the parts of a run from the options of the command line."""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax.sharding import Mesh

from flax_layers.models import Decoder, ExpertsConfig, LayerConfig, ModelConfig, from_pretrained
from flax_layers.models.block import MakeScoreMod
from flax_layers.models.checkpoint.checkpoint import read_folder_config, read_folder_dtype
from flax_layers.models.checkpoint.config_json import write_config
from flax_layers.models.checkpoint.folders import check_replaceable
from flax_layers.models.sharding import RULES, parameter_shardings
from flax_layers.nnx import AlibiBias, RelativeBias
from flax_layers.train import parallel
from flax_layers.train.data import tokenizer_folder
from flax_layers.train.dataset.corpus import Batches
from flax_layers.train.errors import InputError
from flax_layers.train.flops import measured_flops, peak_flops
from flax_layers.train.optimizer import Recipe
from flax_layers.train.trainer import Computation, Trainer, create_model, parameter_shapes

_NEWER = {
    "latent": None,
    "experts": None,
    "use_sinks": False,
    "use_bias": False,
    "swiglu_limit": None,
    "swiglu_alpha": ExpertsConfig.swiglu_alpha,
    "float32_router": True,
}
"""Fields of configurations that older checkpoints do not name, and what they had."""


def model_config(options: argparse.Namespace) -> tuple[ModelConfig, MakeScoreMod | None]:
    """The model that the options describe, and its learned score mod. Raises InputError for options that contradict."""
    if options.model is not None and (options.sizes or options.bias):
        raise InputError(
            "`--model` says all sizes. Leave out `--sizes` and `--bias`, or train from scratch (`--shape`)."
        )
    folder = options.model or options.config
    config = SHAPES[options.shape] if folder is None else read_folder_config(folder)
    if options.sizes:
        config = resized(config, parse_sizes(options.sizes))
    if options.length > config.max_positions:
        raise InputError(
            f"`--length` must be at most the positions of the model, {config.max_positions}. Got {options.length}. "
            "Take shorter rows, or for a model from scratch `--sizes max_positions=...`."
        )
    config, score_mod = with_bias(config, options.bias)
    if options.export is not None:
        _check_export(options, config)
    elif options.export_dtype is not None:
        raise InputError(
            f"`--export-dtype` needs `--export`, the folder to write. Got {options.export_dtype}. Set both."
        )
    return config, score_mod


def _check_export(options: argparse.Namespace, config: ModelConfig) -> None:
    """Raises before training what `save_pretrained` would raise after it."""
    if options.bias is not None:
        raise InputError(
            f"`--export` writes what `transformers` reads, which has no learned bias. Got `--bias {options.bias}`. "
            "Leave one of them out; the checkpoints in `--output` hold the bias."
        )
    try:
        write_config(config)
    except ValueError as error:
        raise InputError(f"`--export` cannot write this model: {error}") from error
    check_replaceable(options.export)


def export_source(options: argparse.Namespace) -> pathlib.Path | None:
    """The folder whose tokenizer belongs to the exported model: `--output` for bytes. None: there is none."""
    return options.output if options.tokenizer == "bytes" else tokenizer_folder(options) or options.model


def export_dtype(options: argparse.Namespace) -> Dtype:
    """The dtype of the exported model: of `--export-dtype`, else of the checkpoint of `--model`, else float32."""
    if options.export_dtype is not None:
        return jnp.dtype(options.export_dtype)
    if options.export is None or options.model is None:
        return jnp.float32
    return read_folder_dtype(options.model)


def with_end_token(config: ModelConfig, token: int | None) -> ModelConfig:
    """The model that ends its texts with the token that ends documents, unless its configuration names such tokens."""
    return config if token is None or config.eos_token_ids else dataclasses.replace(config, eos_token_ids=(token,))


def make_recipe(options: argparse.Namespace) -> Recipe:
    """The optimizer and its schedule."""
    return Recipe(
        options.schedule_steps or options.steps,
        options.learning_rate,
        options.warmup,
        options.final_share,
        weight_decay=options.weight_decay,
        clip=options.clip,
    )


def make_trainer(
    options: argparse.Namespace, recipe: Recipe, config: ModelConfig, score_mod: MakeScoreMod | None, mesh: Mesh
) -> tuple[Trainer, Callable[[], Decoder]]:
    """The trainer, for which nothing is allocated yet, and a function that makes the model, from scratch or not."""
    common: dict[str, Any] = {"dtype": jnp.dtype(options.dtype), "implementation": options.implementation}
    build = lambda: Decoder(config, score_mod=score_mod, rngs=nnx.Rngs(options.seed), **common)
    if options.model is None:
        make_model = functools.partial(create_model, build, mesh)
    else:
        make_model = functools.partial(from_pretrained, options.model, param_dtype=jnp.float32, mesh=mesh, **common)
    how = Computation(
        options.accumulate, options.remat, options.loss_chunk, options.context_strategy, options.context_order
    )
    return Trainer(nnx.eval_shape(build), recipe, how, mesh=mesh, trained=options.train), make_model


def description(
    options: argparse.Namespace, recipe: Recipe, config: ModelConfig, batches: Batches
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything that decides the losses of a run; it must equal the resumed checkpoint's.

    What changes losses only by rounding is left out: the mesh, micro-batches, remat and the backend.

    Returns values by the names of sizes and options: first those of the model, which fix the shapes of its parameters
    or what they mean; then the others, which `--accept-changes` may change.
    """
    described = dataclasses.asdict(config, dict_factory=_described)
    sizes = {name: value for name, value in described.items() if "token_id" not in name}
    layers = sizes.pop("layers")
    model = {f"model.{name}": value for name, value in sizes.items()}
    model |= {"model.layers": len(layers), "attention of each layer": layers, "--bias": options.bias}
    model["--train"] = options.train  # the optimizer has the moments of these alone
    return model, {
        "--batch": options.batch,
        "--length": options.length,
        "--seed": options.seed,
        "--dtype": options.dtype,
        "--learning-rate": recipe.learning_rate,
        "--warmup": recipe.warmup_steps,
        "--schedule-steps": None if recipe.final_share == 1 else recipe.steps,  # a constant rate has no end
        "--final-share": recipe.final_share,
        "--weight-decay": recipe.weight_decay,
        "--clip": recipe.clip,
        "--end-token": batches.corpus.end_token,
        "tokens of --data": batches.corpus.size,
        "fingerprint of --data": batches.corpus.fingerprint,
        "rows to train on": len(batches.rows),
        "order of rows": "grain",
        "learning rate of the first step": recipe.learning_rate / max(recipe.warmup_steps, 1),
    }


def _described(fields: list[tuple[str, object]]) -> dict[str, Any]:
    """The fields of a configuration, without those that older checkpoints do not name and whose value they had."""
    return {name: value for name, value in fields if name not in _NEWER or value != _NEWER[name]}


def all_peak_flops(text: str | None, mesh: Mesh) -> float | None:
    """Peak FLOP/s of all devices of the mesh, None if it is not known. Raises InputError if the text is no rate."""
    if text == "measure":
        one = measured_flops()
    elif text is None:
        one = peak_flops(jax.devices()[0].device_kind)
    else:
        try:
            one = float(text)
        except ValueError as error:
            raise InputError(f"`--peak-flops` must be a number, or `measure`. Got {text!r}.") from error
    return None if one is None else one * mesh.size


def create_mesh(options: argparse.Namespace, config: ModelConfig) -> Mesh:
    """The mesh. Raises InputError if it does not divide the model and its batches."""
    mesh = parallel.make_mesh(parallel.parse_mesh(options.mesh))
    parallel.check_mesh(mesh, config, options.batch, options.accumulate)
    parallel.check_length(mesh, options.length, options.context_order)
    parallel.check_strategy(mesh, config, options.context_strategy)
    try:
        parameter_shardings(parameter_shapes(config), mesh, RULES, num_kv_heads=config.num_kv_heads)
    except ValueError as error:
        raise InputError(str(error)) from error
    return mesh


_LLAMA3 = {"vocabulary": 128256, "num_heads": 32, "num_kv_heads": 8, "max_positions": 131072, "norm_epsilon": 1e-5}

SHAPES = {
    "tiny": ModelConfig(
        family="qwen3", vocabulary=256, width=128, mlp_width=256, num_heads=4, num_kv_heads=2, head_dim=32,
        layers=(LayerConfig(),) * 4, max_positions=4096, qk_norm=True, initializer_range=0.06,
    ),
    "small": ModelConfig(
        family="qwen3", vocabulary=32768, width=768, mlp_width=2048, num_heads=12, num_kv_heads=4, head_dim=64,
        layers=(LayerConfig(),) * 12, max_positions=8192, qk_norm=True,
    ),
    "llama3-1b": ModelConfig(
        width=2048, mlp_width=8192, head_dim=64, layers=(LayerConfig(rotary_base=500000.0),) * 16, tied_embeddings=True,
        **_LLAMA3,
    ),
    "llama3-8b": ModelConfig(
        width=4096, mlp_width=14336, head_dim=128, layers=(LayerConfig(rotary_base=500000.0),) * 32, **_LLAMA3
    ),
}  # fmt: skip
"""By name."""

SIZES = ("vocabulary", "width", "mlp_width", "num_heads", "num_kv_heads", "head_dim", "layers", "max_positions")
"""What can be changed."""

BIASES = {"alibi": AlibiBias, "relative": RelativeBias}
"""Learned score mods, by name. They take the place of the rotary embedding."""


def parse_sizes(text: str) -> dict[str, int]:
    """Reads sizes, as `--sizes` takes them. Raises InputError for a text of another form.

    Example:
        >>> parse_sizes("width=256,layers=8")
        {'width': 256, 'layers': 8}
    """
    sizes = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in SIZES or not size.isascii() or not size.isdigit() or not int(size):
            raise InputError(f"`--sizes` must be sizes of {', '.join(SIZES)}, as width=256,layers=8. Got {part!r}.")
        sizes[name] = int(size)
    return sizes


def resized(config: ModelConfig, sizes: dict[str, int]) -> ModelConfig:
    """The shape with other sizes; more layers than it has repeat them in turn."""
    changes: dict = dict(sizes)
    if "layers" in changes:
        changes["layers"] = tuple(config.layers[i % len(config.layers)] for i in range(sizes["layers"]))
    return dataclasses.replace(config, **changes)


def with_bias(config: ModelConfig, name: str | None) -> tuple[ModelConfig, MakeScoreMod | None]:
    """The shape with a score mod of `BIASES`, by name, in place of the rotary embedding; and that score mod."""
    if name is None:
        return config, None
    layers = tuple(dataclasses.replace(layer, rotary_base=None) for layer in config.layers)
    return dataclasses.replace(config, layers=layers), functools.partial(BIASES[name], config.num_heads)
