"""Loads and saves Hugging Face checkpoints, one tensor at a time."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping

from flax import nnx
from flax.typing import Dtype
from jax.sharding import Mesh

import jflex
from flax_layers.models.checkpoint.config_json import read_config, write_config
from flax_layers.models.checkpoint.families import Raw, family_named
from flax_layers.models.checkpoint.folders import (
    CheckpointError,
    copy_tokenizer,
    recover,
    refuse_adapter,
    remedy_of_missing,
    replaced_folder,
)
from flax_layers.models.checkpoint.fp8_files import FP8, SCALE, BlockFP8, read_quantization
from flax_layers.models.checkpoint.tensor_files import TensorFiles, write_files
from flax_layers.models.checkpoint.tensor_names import TOP_MODULES, Tensor, pieces_of, tensors_of
from flax_layers.models.config import ModelConfig
from flax_layers.models.decoder import Decoder
from flax_layers.models.eight_bit_weights import is_quantized
from flax_layers.models.fused import is_fused
from flax_layers.models.sharding import RULES, Rules, parameter_shardings

Folder = str | pathlib.Path

_IGNORED = (".rotary_emb.inv_freq",)
"""Suffixes of tensors in old Llama files that are not parameters."""

_HEAD = f"{TOP_MODULES['head']}.weight"

_PREDICTING = "eh_proj.weight"
"""The tensor of a layer of DeepSeek-V3 that predicts further tokens, and of no other layer."""


def from_pretrained(
    folder: Folder,
    *,
    dtype: Dtype | None = None,
    param_dtype: Dtype | None = None,
    mesh: Mesh | None = None,
    rules: Rules = RULES,
    implementation: str | tuple[str, ...] | None = None,
    attention_config: jflex.Config | None = None,
    max_positions: int | None = None,
) -> Decoder:
    """Loads a model from a folder that `transformers` or `save_pretrained` wrote.

    Files are memory-mapped. Parameters are loaded one after the other, each shard directly to its device, so the host
    holds at most one parameter at a time. All names and shapes are checked before the first is loaded.

    Weights in FP8 with a scale for each block (`quant_method` fp8 of `config.json`, as of DeepSeek and Qwen) and
    experts in MXFP4 (of gpt-oss) are widened to the dtype of the parameters while they are read.

    Args:
        folder: A folder with `config.json` and one or more `*.safetensors`.
        dtype: Dtype of the computation. Default: `param_dtype`.
        param_dtype: Dtype of the parameters, float32 for training. Default: `dtype`, or else the dtype in the files.
            Parameters that select experts in DeepSeek are float32 in any case.
        mesh: Devices to shard the parameters over. Default: all parameters are on JAX's default device.
        rules: How each parameter is sharded over the mesh.
        implementation: The jflex backend, as for `Decoder`.
        attention_config: Tile sizes and promises of its attention, for `Decoder`.
        max_positions: The longest context that will be used. Default: as in the file. Up to the original context
            of a LongRoPE, the model always has its short factors.

    Raises:
        FileNotFoundError: The folder, or a required file in it, does not exist.
        CheckpointError: The architecture is not supported; or names, shapes or dtypes of tensors do not fit the
            model. The message lists all differences.
        ValueError: The mesh does not divide the parameters.
    """
    folder = pathlib.Path(folder)
    config = read_folder_config(folder, max_positions)
    fp8 = read_quantization(_read_raw(folder))
    with TensorFiles(folder, fp8) as files:
        if param_dtype is None:
            param_dtype = dtype or files.common_dtype()
        build = functools.partial(Decoder, config, dtype=dtype, param_dtype=param_dtype, implementation=implementation)
        build = functools.partial(build, attention_config=attention_config)
        graph, state = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
        leaves = dict(nnx.to_flat_state(state))
        paths = {".".join(map(str, path)): path for path in leaves}
        shapes = {name: leaves[path].shape for name, path in paths.items()}
        tensors = tensors_of(family_named(config.family).modules, shapes, files.shapes)
        _check_tensors(folder, config, tensors, files, fp8)
        shardings = None
        if mesh is not None:
            shardings = parameter_shardings(shapes, mesh, rules, num_kv_heads=config.num_kv_heads)
        for path, pieces in pieces_of(tensors).items():
            leaf, sharding = leaves[paths[path]], None if shardings is None else shardings[path]
            leaves[paths[path]] = leaf.replace(files.read(pieces, leaf.dtype, tensors[pieces[0].tensor], sharding))
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def read_folder_config(folder: Folder, max_positions: int | None = None) -> ModelConfig:
    """Reads `config.json` of a checkpoint; `max_positions` as for `from_pretrained`.

    The embeddings are not tied if the files hold another `lm_head.weight`, whatever `tie_word_embeddings` says:
    Transformers 5.24 then keeps both.

    Raises:
        FileNotFoundError: There is no `config.json`.
        CheckpointError: It cannot be read, or the decoder does not support the model.
        ValueError: `max_positions` is less than 1.
    """
    if max_positions is not None and max_positions < 1:
        raise ValueError(f"`max_positions` must be at least 1. Got {max_positions}. The default is that of the file.")
    recover(folder)
    try:
        config = read_config(_read_raw(folder), max_positions)
    except ValueError as error:
        path = pathlib.Path(folder) / "config.json"
        raise CheckpointError(f"{path} is not the configuration of a supported model: {error}") from error
    if config.tied_embeddings and _has_own_head(pathlib.Path(folder)):
        return dataclasses.replace(config, tied_embeddings=False)
    return config


def read_folder_dtype(folder: Folder) -> Dtype:
    """Reads the dtype of a checkpoint, which most tensors that are not quantized have."""
    with TensorFiles(pathlib.Path(folder), read_quantization(_read_raw(folder))) as files:
        return files.common_dtype()


def _has_own_head(folder: pathlib.Path) -> bool:
    """Tests whether the files hold embeddings, and an output projection that differs from them."""
    if not any(folder.glob("*.safetensors")):
        return False
    with TensorFiles(folder, read_quantization(_read_raw(folder))) as files:
        return files.differ(f"{TOP_MODULES['embed']}.weight", _HEAD)


def _read_raw(folder: Folder) -> Raw:
    """The contents of `config.json`."""
    refuse_adapter(folder)
    path = pathlib.Path(folder) / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"`folder` must hold `config.json`. There is no {path}. {remedy_of_missing(folder)}")
    raw = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ValueError(f"it must hold a JSON object. Got {type(raw).__name__}.")
    return raw


def save_pretrained(
    model: Decoder,
    folder: Folder,
    *,
    source: Folder | None = None,
    dtype: Dtype | None = None,
    max_file_bytes: int = 4 << 30,
) -> None:
    """Saves a model in the format of `transformers`.

    All files are written to a new folder, which then replaces the old one. If writing fails, for example on a full
    disk, an earlier checkpoint is unchanged. If the process is killed during the replacement, the next call that reads
    or writes `folder` restores the earlier checkpoint.

    Args:
        model: The model, on one device or several.
        folder: Where to save it. An earlier checkpoint there is replaced.
        source: A folder whose tokenizer files are copied. Default: `folder` itself, if it has any.
        dtype: Dtype of the tensors, to which parameters are rounded; those that a model of this dtype holds in float32
            stay so. Default: the dtypes of the parameters.
        max_file_bytes: Maximum size of a file. The host holds the tensors of one file at a time.

    Raises:
        CheckpointError: `folder` holds files that do not belong to a checkpoint, or a number is too large for `dtype`.
        ValueError: The format of the family cannot describe the model, or its projections are fused or have eight bits.
        OSError: A file cannot be written.
    """
    folder = pathlib.Path(folder)
    if is_fused(model):
        raise ValueError(
            "`model` must not have fused projections: files hold each projection by itself. Save the model before "
            "`fuse_projections`."
        )
    if is_quantized(model):
        raise ValueError(
            "`model` must not have weights of eight bits: files hold them as they were. Save the model before "
            "`quantize_weights`."
        )
    raw = write_config(model.config)
    values = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    learned = [path for path in values if ".score_mod." in path]
    if learned:
        raise ValueError(
            f"`model` must not have score_mods with parameters, which the format of `transformers` does not know. Got "
            f"{', '.join(learned)}. Save the model with orbax."
        )
    dtypes = {path: value.dtype for path, value in values.items()}
    if dtype is not None:
        shape = nnx.eval_shape(lambda: Decoder(model.config, param_dtype=dtype, rngs=nnx.Rngs(0)))
        dtypes = {".".join(map(str, path)): leaf.dtype for path, leaf in nnx.to_flat_state(nnx.state(shape, nnx.Param))}
    raw["torch_dtype"] = str(dtypes["norm.scale"])
    shapes = {path: value.shape for path, value in values.items()}
    tensors = tensors_of(family_named(model.config.family).modules, shapes)
    with replaced_folder(folder) as staging:
        (staging / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        write_files(staging, tensors, values, dtypes, max_file_bytes)
        copy_tokenizer(folder if source is None else pathlib.Path(source), staging)


def _check_tensors(
    folder: pathlib.Path, config: ModelConfig, tensors: Mapping[str, Tensor], files: TensorFiles, fp8: BlockFP8 | None
) -> None:
    """Raises one error that lists all differences between the tensors of the model and of the files."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    known = set(tensors)
    if config.tied_embeddings:
        known.add(_HEAD)  # some files hold a copy of the embeddings
    quantized = [] if fp8 is None else [name for name in known if files.dtypes.get(name) == FP8]
    known |= {name + SCALE for name in quantized}
    if fp8 is not None:
        matrices = [name for name in tensors if name in quantized and len(shapes[name]) == len(fp8.block)]
        shapes |= {name + SCALE: fp8.scale_shape(shapes[name]) for name in matrices}
    # Layers for multi-token prediction follow the others, and no decoder needs them.
    predicting = tuple(name.removesuffix(_PREDICTING) for name in files.shapes if name.endswith(_PREDICTING))
    is_expected = lambda name: name in known or name.endswith(_IGNORED) or name.startswith(predicting)
    problems: dict[str, list[str]] = {
        "missing": [name for name in shapes if name not in files.shapes],
        "unexpected": [name for name in files.shapes if not is_expected(name)],
        "with another shape": [
            f"{name}: {list(files.shapes[name])}, not {list(shape)}"
            for name, shape in shapes.items()
            if name in files.shapes and files.shapes[name] != shape
        ],
        f"with a dtype other than {', '.join(files.READ)}": [
            f"{name}: {dtype}"
            for name, dtype in files.dtypes.items()
            if name in shapes and dtype not in files.READ and name + SCALE not in shapes
        ],
        "in FP8, though `modules_to_not_convert` of `config.json` names their modules": [
            name for name in tensors if name in quantized and fp8 is not None and fp8.keeps(name)
        ],
    }
    lists = [f"{len(names)} {what}:\n  " + "\n  ".join(names) for what, names in problems.items() if names]
    if lists:
        raise CheckpointError(
            f"The tensors in {folder} do not match its `config.json`, which describes {config.family} with "
            f"{len(config.layers)} layers. Nothing was loaded.\n" + "\n".join(lists)
        )
