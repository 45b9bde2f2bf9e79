"""Reads the scaler objects pickled inside checkpoints, without running code from them.

A pickle is a program: it names functions and calls them. This reader resolves every name itself. Scalers become
`StandIn` values that only hold attributes, tensors and their storages become `Unread`, and any other name is refused.
Nothing is imported.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn, Self, cast

from gradscale.peers._saved import shown

LARGEST_PICKLE = 2**28
"""Bytes of the largest `data.pkl` read from a zip file. Tensors are in other files, so real ones are smaller."""

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""First pickle of a file that `torch.save` wrote before torch 1.6; a version and a system come before the object."""


class _Refused(ValueError):
    """A pickle asked for something other than the known scalers."""


class StandIn:
    """An object of a pickle: its attributes, and none of its behaviour."""

    __slots__ = ("attributes",)

    attributes: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Returns an empty one. What the pickle passes to the constructor is dropped."""
        del args, kwargs
        made = super().__new__(cls)
        made.attributes = {}
        return made

    def __setstate__(self, state: Any) -> None:
        """Keeps the attributes of a pickled object."""
        # Without this method, pickle would call `setattr` with names from the file.
        if not isinstance(state, dict):
            raise _Refused(
                f"A pickled scaler keeps its attributes in a dict. Received: {type(state).__name__}. "
                "It was not written by the class it names."
            )
        self.attributes = {str(key): value for key, value in cast("dict[Any, Any]", state).items()}


class Unread(StandIn):
    """A tensor, a storage or another part of a checkpoint that the scaler does not need."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Drops the state."""
        del state

    def __repr__(self) -> str:
        return "<not read; load the file with `torch.load(path, weights_only=True)` to get tensors>"


_SCALERS = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
    "apex.amp.scaler.LossScaler",
    "apex.fp16_utils.loss_scaler.DynamicLossScaler",
    "apex.fp16_utils.loss_scaler.LossScaler",
)

_UNREAD = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "torch.Size",
    "torch.device",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch.storage._load_from_bytes",
    # torch's `_rebuild_*` functions are called by the pickle, but as `Unread`, whose constructor drops its arguments.
    *(f"torch.{name}" for name in ("float16", "bfloat16", "float32", "float64")),
    *(f"torch.{name}" for name in ("uint8", "int8", "int16", "int32", "int64", "bool")),
    *(
        f"{module}.{kind}Storage"
        for module in ("torch", "torch.cuda")
        for kind in ("Float", "Half", "BFloat16", "Double", "Byte", "Char", "Short", "Int", "Long", "Bool")
    ),
    "torch.storage.UntypedStorage",
)

_ANSWERS: dict[str, type] = {
    "collections.OrderedDict": OrderedDict,
    **dict.fromkeys(_SCALERS, StandIn),
    **dict.fromkeys(_UNREAD, Unread),
}


class _Reader(pickle.Unpickler):
    """An unpickler that knows the names of `_ANSWERS` and no others."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in _ANSWERS:
            raise _Refused(
                "A pickled state may hold the scalers of DeepSpeed and apex, and plain values. "
                f"Received: a pickle that uses `{name}`. If you trust the file, load it with the system that wrote "
                "it and pass the mapping, or the scaler object itself."
            )
        return _ANSWERS[name]

    def persistent_load(self, pid: Any) -> Unread:
        """Stands for a tensor's data, which `torch.save` keeps outside the pickle."""
        del pid
        return Unread()


def unpickled(data: bytes) -> Any:
    """Returns the plain values of a pickle, with inert stand-ins for scalers and tensors.

    Takes the bytes of a pickle, or of a whole file that `torch.save` wrote, in its zip form or in the older one.

    Raises:
        ValueError: the pickle names anything but a known scaler, or is damaged.
    """
    try:
        return _load(io.BytesIO(_pickle_of_zip(data) if data.startswith(b"PK") else data))
    except _Refused as refused:
        raise ValueError(str(refused)) from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        _damaged(error)


def attributes_of(scaler: Any) -> Mapping[str, Any]:
    """Returns the attributes of a scaler object: pickled, already unpickled, or the real one."""
    if isinstance(scaler, bytes | bytearray | memoryview):
        scaler = unpickled(bytes(cast("bytes", scaler)))
    if isinstance(scaler, StandIn):
        return scaler.attributes
    if isinstance(scaler, Mapping):
        return cast("Mapping[str, Any]", scaler)
    if isinstance(found := getattr(scaler, "__dict__", None), dict):
        return cast("dict[str, Any]", found)
    raise TypeError(
        "`loss_scaler` must be the scaler object, its attributes as a mapping, or the bytes of its pickle. "
        f"Received: {shown(scaler)}."
    )


def _load(stream: io.BytesIO) -> Any:
    first = _Reader(stream).load()
    if first != _LEGACY_MAGIC:
        return first
    _, _, value = (_Reader(stream).load() for _ in range(3))
    return value


def _pickle_of_zip(data: bytes) -> bytes:
    """Returns the one `data.pkl` of a zip file that `torch.save` wrote."""
    import zipfile  # a tenth of the time that importing gradscale takes, and seldom needed

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = [info for info in archive.infolist() if info.filename.rpartition("/")[2] == "data.pkl"]
        if len(found) != 1:
            raise _Refused(f"A file of `torch.save` holds one `data.pkl`. Received: a zip file with {len(found)}.")
        if found[0].file_size > LARGEST_PICKLE:
            raise _Refused(
                f"The `data.pkl` of a checkpoint must not be larger than {LARGEST_PICKLE} bytes. "
                f"Received: {found[0].file_size}. Tensors are stored in files of their own."
            )
        return archive.read(found[0])


def _damaged(error: Exception) -> NoReturn:
    raise ValueError(
        "The bytes must be a pickle, or a file that `torch.save` wrote. "
        f"Received: something that cannot be read ({type(error).__name__}: {error})."
    ) from error
