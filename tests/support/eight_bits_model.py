"""How a cache of eight bits rounds keys and values, in plain numpy."""

import ml_dtypes
import numpy as np

LARGEST = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127}
DTYPES = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}


def scales_of_rows(rows, name):
    """One float32 for each row of the last axis."""
    largest = np.abs(rows.astype(np.float32)).max(axis=-1)
    return np.maximum(largest * np.float32(1 / LARGEST[name]), np.finfo(np.float32).tiny)


def in_tiles(columns):
    """Latent columns [N, latent] in tiles of 128, [N, tiles, 128]."""
    return columns.reshape(*columns.shape[:-1], columns.shape[-1] // 128, 128)


def scales_of_tiles(tiles):
    """One power of two for each tile [N, tiles, 128]: the least one with which 448 holds all of it."""
    mantissa, exponent = np.frexp(np.abs(tiles.astype(np.float64)).max(axis=-1) / 448)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = np.where(mantissa == 0, -126, np.maximum(exponent, -126))
    return np.ldexp(1.0, exponent).astype(np.float32)


def quantized(rows, scale, name):
    """Rows [..., D] of scales [...] in eight bits."""
    inverse = (np.float32(1) / scale)[..., None]
    scaled = np.clip(rows.astype(np.float32) * inverse, -LARGEST[name], LARGEST[name])
    return (np.rint(scaled) if name == "int8" else scaled).astype(DTYPES[name])


def dequantized(held, scale):
    """What is held times its scale, in float32."""
    return held.astype(np.float32) * scale[..., None]
