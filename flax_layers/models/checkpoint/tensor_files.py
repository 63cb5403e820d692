"""Memory-mapped tensors in one or more `*.safetensors` files, read and written one after the other."""

import contextlib
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jax.sharding import Sharding
from jaxtyping import Array

from flax_layers.models.checkpoint.folders import CheckpointError
from flax_layers.models.checkpoint.fp8_files import FP8, SCALE, BlockFP8, WidenedTensor
from flax_layers.models.checkpoint.mxfp4_files import BLOCKS, MXFP4, SCALES, PackedTensor, packed_shapes
from flax_layers.models.checkpoint.optional import needs
from flax_layers.models.checkpoint.tensor_names import ParameterSlice, Shape, Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Index = tuple[slice, ...]
CHUNK_BYTES = 16 << 20
"""Bytes that are converted to another dtype at a time."""


class Parts(Protocol):
    """A tensor that is read in parts."""

    def __getitem__(self, index: tuple, /) -> np.ndarray: ...


class TensorFiles(contextlib.ExitStack):
    """The tensors in a folder. Files stay open and memory-mapped until the context ends.

    Raises FileNotFoundError if a file is missing, and CheckpointError if one cannot be read or does not match the
    index.
    """

    READ = ("F32", "F16", "BF16", "F64", MXFP4)
    """Supported dtypes, by their names in files."""

    def __init__(self, folder: pathlib.Path, fp8: BlockFP8 | None = None):
        super().__init__()
        self._fp8 = fp8
        self._slices: dict[str, Any] = {}
        self._paths: dict[str, pathlib.Path] = {}
        self._offsets: dict[pathlib.Path, dict[str, int]] = {}
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, str] = {}
        for path, names in _paths(folder).items():
            file = self.enter_context(_open(path))
            absent = [] if names is None else sorted(set(names).difference(file.keys()))
            if absent:
                raise CheckpointError(
                    f"{path} does not hold tensors that {INDEX} lists: {', '.join(absent)}. Download both again."
                )
            for name in file.keys() if names is None else names:
                piece = file.get_slice(name)
                self._slices[name] = piece
                self._paths[name] = path
                self.shapes[name] = tuple(piece.get_shape())
                self.dtypes[name] = piece.get_dtype()
        for name, shape in packed_shapes(self.shapes).items():
            blocks, scales = (self._slices[name + x] for x in (BLOCKS, SCALES))
            self._slices[name], self.shapes[name], self.dtypes[name] = PackedTensor(blocks, scales), shape, MXFP4
            for part in (name + BLOCKS, name + SCALES):
                del self.shapes[part], self.dtypes[part]

    def common_dtype(self) -> Dtype:
        """The dtype of most tensors that are neither in FP8 nor scales."""
        names = [dtype for name, dtype in self.dtypes.items() if dtype in _DTYPES and not name.endswith(SCALE)]
        return _DTYPES[max(sorted(set(names)), key=names.count)] if names else jnp.float32

    def differ(self, one: str, other: str) -> bool:
        """Tests whether two tensors of two axes are both there and differ."""
        if not {one, other} <= self.shapes.keys():
            return False
        rows, *columns = self.shapes[one]
        step = max(1, CHUNK_BYTES // (4 * max(1, math.prod(columns))))
        parts = [(slice(start, min(start + step, rows)), slice(0, columns[0])) for start in range(0, rows, step)]
        first, second = self._tensor(one), self._tensor(other)
        # As float32, for one may be saved in another dtype.
        return self.shapes[one] != self.shapes[other] or any(
            not np.array_equal(first[part].astype(np.float32), second[part].astype(np.float32)) for part in parts
        )

    def read(self, pieces: Sequence[ParameterSlice], dtype: Dtype, tensor: Tensor, sharding: Sharding | None) -> Array:
        """Reads a parameter to devices, each of which gets only its own shard; by default to JAX's default device.

        It returns when the array is on its devices and the host copy is no longer needed. `tensor` holds the
        first piece.
        """
        shape = pieces[0].shape
        final = shape[::-1] if tensor.transposed else shape

        def read_slice(piece: ParameterSlice, index: Index) -> np.ndarray:
            source = _View(self._tensor(piece.tensor), piece.expert, *piece.column)
            return _part(source, piece.start, shape, dtype, tensor.transposed, index)

        def read_index(index: Index) -> np.ndarray:
            if not tensor.per_expert:
                return read_slice(pieces[0], index)
            chosen, index = pieces[index[0]], index[1:]
            sizes = [len(range(*x.indices(size))) for x, size in zip(index, final, strict=True)]
            out = np.empty((len(chosen), *sizes), dtype)
            for number, piece in enumerate(chosen):
                out[number] = read_slice(piece, index)
            return out

        whole = (len(pieces), *final) if tensor.per_expert else final
        if sharding is None:
            return jax.block_until_ready(jax.device_put(read_index((slice(None),) * len(whole))))
        parts: dict[str, np.ndarray] = {}  # devices with equal shards share a copy

        def part(index: Index | None) -> np.ndarray:
            assert index is not None  # of an array with axes
            if str(index) not in parts:
                parts[str(index)] = read_index(index)
            return parts[str(index)]

        return jax.block_until_ready(jax.make_array_from_callback(whole, sharding, part))

    def _tensor(self, name: str) -> Parts:
        """A tensor that is read in parts; one in FP8 as float32."""
        if self._fp8 is None or self.dtypes[name] != FP8:
            return self._slices[name]
        path = self._paths[name]
        if path not in self._offsets:
            self._offsets[path] = _offsets(path)
        values = np.memmap(path, np.uint8, "r", self._offsets[path][name], self.shapes[name])
        return WidenedTensor(values, self._slices[name + SCALE][:], self._fp8.block)


_DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


class _View(NamedTuple):
    """One expert of a tensor, or all of it; and each `step`-th column."""

    tensor: Parts
    expert: int | None
    offset: int
    step: int

    def __getitem__(self, index: Index) -> np.ndarray:
        *rows, last = index
        index = (*rows, slice(last.start * self.step, last.stop * self.step))
        chunk = self.tensor[index] if self.expert is None else self.tensor[(self.expert, *index)]
        return chunk[..., self.offset :: self.step]


def _part(piece: _View, start: int, shape: Shape, dtype: Dtype, transposed: bool, index: Index) -> np.ndarray:
    """One shard of the result, read, cast and transposed a few rows at a time."""
    index = index[::-1] if transposed else index
    ranges = [range(*x.indices(size)) for x, size in zip(index, shape, strict=True)]
    sizes = [len(x) for x in ranges]
    out = np.empty(sizes[::-1] if transposed else sizes, dtype)
    step = max(1, CHUNK_BYTES // (4 * max(1, int(np.prod(sizes[1:])))))
    columns = tuple(slice(x.start, x.stop) for x in ranges[1:])
    for first in range(0, sizes[0], step):
        last = min(first + step, sizes[0])
        begin = start + ranges[0].start
        chunk = piece[(slice(begin + first, begin + last), *columns)]
        target = (slice(None),) * (len(sizes) - 1) + (slice(first, last),) if transposed else slice(first, last)
        chunk = chunk.astype(dtype, copy=False)  # before it is transposed, which is faster
        out[target] = chunk.T if transposed else chunk
    return out


def _offsets(path: pathlib.Path) -> dict[str, int]:
    """Offsets of the tensors in a file, for those in FP8: `safetensors` does not read them for numpy."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + x["data_offsets"][0] for name, x in header.items() if name != "__metadata__"}


def _paths(folder: pathlib.Path) -> dict[pathlib.Path, list[str] | None]:
    """Files, with the tensors that the index lists for each; None without an index.

    As in Transformers, `model.safetensors` counts alone. Beside it may be an index of an earlier save, or Mistral's own
    `consolidated.safetensors`.
    """
    if (folder / SINGLE).exists():
        return {folder / SINGLE: None}
    index = folder / INDEX
    if index.exists():
        try:
            file_of: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{index} is not an index of tensors: {error!r}. Download it again.") from error
        listed: dict[pathlib.Path, list[str] | None] = {}
        for name, file in file_of.items():
            listed.setdefault(folder / file, []).append(name)  # pyright: ignore[reportOptionalMemberAccess]
        missing = [str(path) for path in listed if not path.exists()]
        if missing:
            raise FileNotFoundError(
                f"{INDEX} lists files that do not exist: {', '.join(missing)}. Download them, or correct the index."
            )
        return listed
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not files:
        others = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise FileNotFoundError(
            f"`folder` must hold *.safetensors. {folder} holds {others}. Download them; other formats, as Mistral's "
            "consolidated.safetensors, are not read."
        )
    return dict.fromkeys(files)


def _open(path: pathlib.Path) -> Any:
    with needs("safetensors"):
        import safetensors
    try:
        return safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}. Download it again.") from error


def write_files(
    folder: pathlib.Path,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Array],
    dtypes: Mapping[str, np.dtype],
    max_file_bytes: int,
) -> None:
    """Writes tensors to one file, or to several files with an index.

    Values of parameters, and dtypes to which they are rounded, are by path. A tensor larger than `max_file_bytes` gets
    a file of its own. Raises CheckpointError if a number is too large for its dtype, and OSError if writing fails.
    """
    with needs("safetensors"):
        import safetensors
        import safetensors.numpy
    size = {name: math.prod(x.shape) * dtypes[x.parts[0]].itemsize for name, x in tensors.items()}
    groups, total = [[]], 0
    for name in tensors:
        if groups[-1] and total + size[name] > max_file_bytes:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size[name]
    file_of: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        several = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        file = "model.safetensors" if len(groups) == 1 else several
        try:
            safetensors.numpy.save_file(
                {name: _joined(tensors[name], values, dtypes) for name in names},
                folder / file,
                metadata={"format": "pt"},
            )
        except safetensors.SafetensorError as error:
            raise OSError(f"Writing {folder / file} failed: {error}.") from error
        file_of |= dict.fromkeys(names, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(size.values())}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _joined(tensor: Tensor, values: Mapping[str, Array], dtypes: Mapping[str, np.dtype]) -> np.ndarray:
    """The tensor of one or more parameters, on the host."""
    parts = []
    for path in tensor.parts:
        array = values[path] if tensor.expert is None else values[path][tensor.expert]
        rounded = array.astype(dtypes[path])
        overflows = jnp.finfo(rounded.dtype).maxexp < jnp.finfo(array.dtype).maxexp  # of float16
        if overflows and jnp.any(jnp.isinf(rounded) & jnp.isfinite(array)):
            raise CheckpointError(
                f"`dtype` must hold all parameters. Got {rounded.dtype}, and numbers up to {jnp.abs(array).max():.3g} "
                f"in {path}. Take bfloat16."
            )
        parts.append(np.asarray(rounded))
    if len(parts) > 1 and tensor.alternating:
        return np.stack(parts, axis=-1).reshape(tensor.shape)
    parts = [part.T if tensor.transposed else part for part in parts]
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts))
