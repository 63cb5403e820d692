"""Weights in FP8 with a scale for each block, as in DeepSeek's and Qwen's files: widened while they are read.

A weight ``X.weight`` of dtype float8_e4m3fn, ``[out, in]``, stands beside ``X.weight_scale_inv``, ``[ceil(out / 128),
ceil(in / 128)]``: a factor for each block of 128 x 128. Blocks at the end may be ragged.
"""

import dataclasses
import re
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from flax_layers.models.checkpoint.families import Raw
from flax_layers.models.checkpoint.tensor_names import Shape

FP8 = "F8_E4M3"
"""Name of the dtype in files."""

SCALE = "_scale_inv"
"""Suffix of the name of a weight in the name of its scales."""

_VALUES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
"""Of each byte; a look-up is faster than a conversion."""

_KEPT_KEYS = ("modules_to_not_convert", "ignored_layers")


@dataclasses.dataclass(frozen=True)
class BlockFP8:
    """The quantization of the weights of a checkpoint."""

    block: tuple[int, int]  # rows and columns of a block of a weight ``[out, in]``
    # names of modules that are not quantized, as in `config.json`: of one module, of all modules in it, or its last
    # parts; a ``*`` stands for one part, such as the number of a layer
    kept: tuple[str, ...] = ()

    def scale_shape(self, shape: Shape) -> Shape:
        """The shape of the scales of a weight.

        >>> BlockFP8((128, 128)).scale_shape((576, 7168))
        (5, 56)
        """
        return tuple(-(-size // block) for size, block in zip(shape, self.block, strict=True))

    def keeps(self, name: str) -> bool:
        """Tests whether the module of a tensor is one that is not quantized.

        >>> fp8 = BlockFP8((128, 128), ("lm_head", "model.layers.*.mlp.gate"))
        >>> fp8.keeps("lm_head.weight"), fp8.keeps("model.layers.3.mlp.gate_proj.weight")
        (True, False)
        """
        module = name.rpartition(".")[0]
        patterns = (re.escape(kept).replace(r"\*", r"[^.]*") for kept in self.kept)
        return any(re.search(rf"(^|\.){pattern}(\.|$)", module) for pattern in patterns)


def read_quantization(raw: Raw) -> BlockFP8 | None:
    """Reads `quantization_config` of a `config.json`.

    Returns:
        None: weights are not quantized; or in MXFP4, which names and shapes of tensors tell.

    Raises:
        ValueError: They are quantized by a method, or in blocks, that are not supported.

    Example:
        >>> read_quantization({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
        BlockFP8(block=(128, 128), kept=())
    """
    config = raw.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(
            f"`quantization_config` of `config.json` must be a JSON object. Got {type(config).__name__}. Download it "
            "again."
        )
    if config.get("quant_method") == "mxfp4":
        return None
    for key, needed in {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}.items():
        value = config.get(key)
        if value != needed and (value is not None or key == "quant_method"):
            raise ValueError(
                f"`{key}` in `quantization_config` of `config.json` must be {needed!r}: weights are read in MXFP4, "
                f"and in FP8 with a scale for each block. Got {value!r}, which is not read. Use the checkpoint in 16 "
                "bits."
            )
    block = config.get("weight_block_size")
    kept = next((config[key] for key in _KEPT_KEYS if config.get(key)), [])
    if not isinstance(block, list) or len(block) != 2 or not all(type(x) is int and x > 0 for x in block):
        raise ValueError(
            "`weight_block_size` in `quantization_config` of `config.json` must be two positive integers, as [128, "
            f"128]. Got {block!r}. Scales for whole tensors, channels or groups are not read. Use the checkpoint in 16 "
            "bits."
        )
    if not isinstance(kept, list) or not all(isinstance(x, str) for x in kept):
        raise ValueError(
            "`modules_to_not_convert` in `quantization_config` of `config.json` must be a list of names. Got "
            f"{kept!r}. Download it again."
        )
    return BlockFP8((block[0], block[1]), tuple(kept))


class WidenedTensor:
    """A weight in FP8, ``[out, in]``, whose parts are read as float32: each value times the scale of its block."""

    def __init__(self, values: np.ndarray, scales: np.ndarray, block: tuple[int, int]):
        self._values, self._height = values, block[0]
        self._scales = np.repeat(scales.astype(np.float32), block[1], axis=1)  # of each column

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """The products of some rows and columns, without a step."""
        widened = _VALUES[self._values[index]]
        start, stop, _ = index[0].indices(len(self._values))
        columns = slice(*index[1].indices(self._values.shape[1]))
        for number in range(start // self._height, -(-stop // self._height)):
            first, last = max(number * self._height, start), min((number + 1) * self._height, stop)
            widened[first - start : last - start] *= self._scales[number, columns]
        return widened
