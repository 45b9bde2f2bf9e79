"""The tensors of a checkpoint, one after the other: safetensors, or torch's own files. No pickled code is run."""

import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from gradscale._extras import require

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "C64": np.complex64,
}
"""The floating-point types of safetensors, by the name in its header. Others are not weights that a cast could lose."""

LARGEST_HEADER = 100_000_000
"""Bytes. The limit of the format's own reader."""

MOST_READS = 100
"""How often the numbers of a file of torch's may be read, by tensors that are views of them, as tied weights are."""

TORCH_FILES = (".bin", ".pt", ".pth", ".ckpt")

DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What JSON raises that is broken, nested too deeply, or not what it should be."""


def tensors_of(path: str) -> Iterator[tuple[str, Array]]:
    """Yields name and numbers of every floating-point tensor of a checkpoint: of a complex one, the two parts.

    Args:
        path: a `.safetensors` file, the `.index.json` of several, a file of `torch.save`, or a folder with one of them.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not what its name says.
        MissingExtra: the file is torch's, and torch is not installed.
    """
    file = _chosen(Path(path))
    if file.name.endswith(".index.json"):
        for part in _parts(file):
            yield from tensors_of(str(part))
    elif file.suffix == ".safetensors":
        yield from _safetensors(file)
    elif file.suffix in TORCH_FILES:
        yield from _saved_by_torch(file)
    else:
        raise ValueError(
            f"A checkpoint must be a .safetensors file, a .index.json of several, or one of torch's "
            f"({', '.join(TORCH_FILES)}). Received: {path}."
        )


def _chosen(path: Path) -> Path:
    """Returns the file to read: of a folder, the index of its parts, or the one checkpoint in it."""
    if not path.is_dir():
        return path
    for pattern in ("*.safetensors.index.json", "*.bin.index.json", "*.safetensors", *map("*{}".format, TORCH_FILES)):
        found = sorted(path.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(each.name for each in found[:3])
            raise ValueError(f"{path} has several checkpoints: {names}. Name one of them.")
    raise ValueError(f"{path} has no checkpoint: no .safetensors file and none of torch's.")


def _parts(index: Path) -> list[Path]:
    """Returns the files that an index names, each once."""
    try:
        mapping = json.loads(index.read_text())["weight_map"]
        names = sorted(set(mapping.values()))
        # Beside the index: a name that leads elsewhere is not one that a trainer writes.
        if any(os.path.basename(name) != name for name in names):
            raise ValueError("a name is a path")
        if wrong := [name for name in names if not name.endswith((".safetensors", *TORCH_FILES))]:
            raise ValueError(f"{wrong[0]!r} is no file with tensors")
    except DAMAGED as error:
        raise ValueError(f"{index} is not the index of a checkpoint: {error}.") from None
    return [index.parent / name for name in names]


def _safetensors(file: Path) -> Iterator[tuple[str, Array]]:
    """Yields the tensors of a safetensors file: 8 bytes with the length of a JSON header, the header, the numbers."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise ValueError(f"{file} is not a safetensors file, or is cut short: its header does not fit.")
        text = stream.read(length)
    try:
        header = cast(dict[str, Any], json.loads(text))
        entries = [(name, _entry(each, 8 + length, size)) for name, each in header.items() if name != "__metadata__"]
        if sum(math.prod(entry[1]) * entry[0].itemsize for _, entry in entries if entry) > size:
            raise ValueError("its tensors overlap")
    except DAMAGED as error:
        raise ValueError(f"{file} is not a safetensors file, or is cut short: {error}.") from None
    for name, entry in entries:
        if entry is not None:
            dtype, shape, offset = entry
            empty = 0 in shape
            array = np.empty(shape, dtype) if empty else np.memmap(file, dtype, "r", offset, shape)
            yield name, array.reshape(-1).view(np.float32) if dtype == np.complex64 else array


def _entry(entry: Mapping[str, Any], data: int, size: int) -> tuple[Any, tuple[int, ...], int] | None:
    """Returns dtype, shape and position of a tensor; None for one that does not hold floating-point numbers."""
    begin, end = (int(each) for each in entry["data_offsets"])
    shape = tuple(int(each) for each in entry["shape"])
    if not 0 <= begin <= end <= size - data:
        raise ValueError("a tensor ends outside of the file")
    if entry["dtype"] not in DTYPES:
        return None
    dtype = np.dtype(DTYPES[entry["dtype"]])
    if min(shape, default=0) < 0 or int(np.prod(shape, dtype=object)) * dtype.itemsize != end - begin:
        raise ValueError("a tensor does not have the size of its shape")
    return dtype, shape, data + begin


def _saved_by_torch(file: Path) -> Iterator[tuple[str, Array]]:
    """Yields the tensors of a file of `torch.save`, loaded as weights only."""
    require(f"{file.name}, a file of torch's,", "torch", extra="torch")
    import torch

    file.open("rb").close()  # raises for a file that is not there, as for the others
    try:
        with warnings.catch_warnings(action="ignore"):  # about a pickle that is refused below
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types: a bad zip file, a pickle that is refused, a file that ends early
        # Not torch's text, which advises to load the file without this protection.
        held = re.search(r"GLOBAL (\S+)", str(error))
        kind = f"holds {held[1]}, which is no tensor" if held else "is not a file of `torch.save`, or is cut short"
        raise ValueError(
            f"{file} cannot be loaded as weights only, since no pickled code is run: it {kind}. Save the weights "
            "alone: `torch.save(model.state_dict(), path)`, or safetensors."
        ) from None
    try:
        leaves = list(_flat("", loaded))
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply, or contains itself. Save the weights alone.") from None
    left = MOST_READS * file.stat().st_size
    for name, tensor in leaves:
        if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            try:
                with warnings.catch_warnings(action="ignore"):  # about kinds of tensors that torch may change
                    numbers = _numbers(tensor.detach())
                left -= numbers.nbytes
                real = torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers
                array = real.to(torch.float64 if real.dtype == torch.float64 else torch.float32).numpy(force=True)
            except RuntimeError as error:  # of a kind without numbers, such as one on the meta device
                raise ValueError(f"{file}: {name} cannot be read: {error} Save the weights alone.") from None
            if left < 0:
                raise ValueError(f"{file} has views of the same numbers, {MOST_READS} times its size. Save them once.")
            yield name, array


def _numbers(tensor: Any) -> Any:
    """Returns the numbers that a tensor holds: of one that repeats them, as an expanded one does, all of its memory."""
    if tensor.is_sparse:
        tensor = tensor._values()
    elif tensor.is_nested or str(tensor.layout) != "torch.strided":
        tensor = tensor.values()
    memory = tensor.untyped_storage()
    return tensor if tensor.nbytes <= memory.nbytes() else tensor.new_empty(0).set_(memory)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dicts and lists with their paths, without the state of optimizers."""
    if isinstance(value, Mapping | list | tuple):
        pairs = cast(Any, value.items() if isinstance(value, Mapping) else enumerate(cast(Any, value)))
        for key, inner in pairs:
            if str(key).startswith("optim"):  # moments of an optimizer, which no cast of the model reaches
                continue
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, value
