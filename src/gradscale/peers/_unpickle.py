"""Reads the scaler objects pickled inside checkpoints, without running code from them.

A pickle names functions and calls them. Here every name has an answer of our own: scalers become `StandIn` values that
only hold attributes, tensors and their storages become `UNREAD`, and any other name is refused. Nothing is imported.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from gradscale._shown import shown
from gradscale.peers._pickle_machine import Machine
from gradscale.peers._pickle_reader import read_pickle
from gradscale.peers._stand_ins import UNREAD, Made, StandIn
from gradscale.peers._zip_member import member_of_zip

MOST_WORK = 1_000_000
"""Instructions and values in the pickle of any file. A tensor in a checkpoint is about 50, so that 20,000 fit."""

BYTES_FOR_WORK = 256
"""Bytes of a file that allow one more. So a file with more tensors is read if they have 3,000 elements on average."""

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""First pickle of a file that `torch.save` wrote before torch 1.6; a version and a system come before the object."""

_SCALERS = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
    "apex.amp.scaler.LossScaler",
    "apex.fp16_utils.loss_scaler.DynamicLossScaler",
    "apex.fp16_utils.loss_scaler.LossScaler",
)

_UNREAD = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "torch.Size",
    "torch.Tensor",
    "torch.device",
    "torch._tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch.storage._load_from_bytes",
    *(f"torch.{name}" for name in ("float16", "bfloat16", "float32", "float64")),
    *(f"torch.{name}" for name in ("uint8", "int8", "int16", "int32", "int64", "bool")),
    *(
        f"{module}.{kind}Storage"
        for module in ("torch", "torch.cuda")
        for kind in ("Float", "Half", "BFloat16", "Double", "Byte", "Char", "Short", "Int", "Long", "Bool")
    ),
    "torch.storage.UntypedStorage",
)


def _unread() -> Made:
    return UNREAD


_NAMES: dict[str, Callable[[], Made]] = {
    "collections.OrderedDict": dict,
    **dict.fromkeys(_SCALERS, StandIn),
    **dict.fromkeys(_UNREAD, _unread),
}


def unpickled(data: bytes) -> Any:
    """Returns the plain values of a pickle, with inert stand-ins for scalers and tensors.

    Takes the bytes of a pickle, or of a whole file that `torch.save` wrote, in its zip form or in the older one. It
    needs less than 100 MB and about a second, or a fifth of the size of a file that is larger than 256 MB.

    Raises:
        ValueError: the pickle names anything but a known scaler, or is damaged or too large.
    """
    pickled = member_of_zip(data, "data.pkl") if data.startswith(b"PK") else data
    machine = Machine(pickled, _NAMES, max(MOST_WORK, len(data) // BYTES_FOR_WORK))
    first = read_pickle(machine)
    if first != _LEGACY_MAGIC:
        return first
    _, _, value = (read_pickle(machine) for _ in range(3))
    return value


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
