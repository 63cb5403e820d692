"""Weights of experts in MXFP4, as in the files of gpt-oss: widened while they are read.

A weight ``X``, ``[experts, in, out]``, is in ``X_blocks``, uint8 of ``[experts, out, in / 32, 16]``, and in
``X_scales``, uint8 of ``[experts, out, in / 32]``. A byte holds two values of 4 bits, the first in its lower half. A
scale is the biased exponent of a power of two, by which 32 values are multiplied.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import UInt8

from flax_layers.models.checkpoint.tensor_names import Shape

MXFP4 = "MXFP4"
"""Name of the dtype in messages."""

BLOCKS, SCALES = "_blocks", "_scales"

_SIZE, _BYTES, _BIAS = 32, 16, 127

_HALF = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = np.concatenate([_HALF, -_HALF])
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1).view(np.uint64)[:, 0]
"""Both values of each byte, as one number, which is faster to look up."""


def packed_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes, by name, of weights in MXFP4 whose blocks and scales are there and of one size.

    Example:
        >>> packed_shapes({"down_proj_blocks": (4, 96, 2, 16), "down_proj_scales": (4, 96, 2)})
        {'down_proj': (4, 64, 96)}
    """
    weights = {}
    for name, shape in shapes.items():
        weight = name.removesuffix(BLOCKS)
        if weight != name and len(shape) == 4 and shape[3] == _BYTES and shapes.get(weight + SCALES) == shape[:3]:
            weights[weight] = (shape[0], shape[2] * _SIZE, shape[1])
    return weights


class PackedTensor:
    """A weight in MXFP4 whose parts are read as float32; blocks and scales may be slices of `safetensors`."""

    def __init__(
        self, blocks: UInt8[np.ndarray, "experts out groups 16"], scales: UInt8[np.ndarray, "experts out groups"]
    ):
        self._blocks, self._scales = blocks, scales

    def __getitem__(self, index: tuple[int, slice, slice]) -> np.ndarray:
        """The products of some rows and columns of an expert, without a step."""
        expert, rows, columns = index
        first = rows.start // _SIZE
        part = (expert, columns, slice(first, -(-rows.stop // _SIZE)))
        exponents = self._scales[part].astype(np.int32) - _BIAS
        values = _PAIRS[self._blocks[part]].view(np.float32)
        values *= np.ldexp(np.float32(1.0), exponents)[..., None]
        return values.reshape(len(values), -1).T[rows.start - first * _SIZE : rows.stop - first * _SIZE]
