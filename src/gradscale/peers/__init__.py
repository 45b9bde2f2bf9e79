"""Other systems' loss scalers: their exact rules, and their saved states in and out."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

from gradscale.peers._peer import Peer
from gradscale.peers._saved import Imported
from gradscale.peers._unpickle import StandIn, unpickled
from gradscale.policies.contract import Policy, ScaleState

__all__ = ["PEERS", "export_state", "import_state", "preset"]

_SYSTEMS = (
    *("torch", "apex", "deepspeed", "megatron", "fairseq", "keras", "tf-keras", "jmp", "flax", "mxnet", "paddle"),
    *("mindspore", "openseq2seq", "popart", "chainer", "verl"),
)


def _peer_in(name: str) -> Peer:
    """Returns a system, which is a module of its name with `_` for `-`. One that saves nothing has no `read`."""
    module = import_module(f"gradscale.peers.{name.replace('-', '_')}")
    return Peer(name, module.VARIANTS, getattr(module, "read", None), getattr(module, "write", None))


PEERS: Mapping[str, Peer] = MappingProxyType({name: _peer_in(name) for name in _SYSTEMS})
"""Every system, by name."""

SYSTEM_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "accelerate": "torch",
        "lightning": "torch",
        "pytorch": "torch",
        "torch-xla": "torch",
        "rl": "verl",
        "megatron-lm": "megatron",
        "tensorflow": "tf-keras",
        "tf": "tf-keras",
    }
)
"""Other names of systems."""


def preset(system: str, variant: str | None = None, **peer_config: Any) -> Policy:
    """Returns a policy that changes the scale exactly as another system does, off-by-ones and missing bounds included.

    Args:
        system: name of the system, in any case, with `-` or `_`; `gradscale.peers.PEERS` has them all.
        variant: which of its rules, by the name of the class or function that holds it; the first by default.
        **peer_config: settings by that system's own names; those left out have that system's defaults.

    Raises:
        TypeError: a keyword is unknown or missing, or a value has the wrong type.
        ValueError: the system or variant is unknown, or a value is out of range.

    >>> preset("torch", growth_interval=100).growth_interval
    100
    >>> preset("deepspeed", "config", hysteresis=4).hysteresis
    4
    """
    return _peer(system).build(variant, peer_config)


def import_state(system: str, mapping: Mapping[str, Any] | Sequence[Any] | bytes) -> Imported:
    """Returns the policy and the state that another system saved, to continue exactly as it would have.

    Settings that the system does not save are its defaults. Never runs code from the file: a pickled DeepSpeed or apex
    scaler is read as plain attributes, and a pickle that holds anything else is refused. Whatever the bytes are, they
    are read or refused in less than 100 MB and about a second; large checkpoints take a little more.

    Args:
        system: name of the system, as for `preset`.
        mapping: what it saved: its own mapping or the checkpoint around it, a list of them for Megatron's chained
            optimizers, or the bytes of a pickle or of a file that `torch.save` wrote.

    Raises:
        TypeError: `mapping` or a value in it has the wrong type.
        ValueError: the system is unknown or saves nothing; a key is missing or unknown; a value is out of range; bytes
            are damaged, too large, or hold anything that is not as it should be.

    >>> saved = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
    ...          "_growth_tracker": 7}
    >>> policy, state = import_state("torch", saved)
    >>> float(state.scale), int(state.clean_steps)
    (1024.0, 7)
    """
    peer = _peer(system)
    if peer.read is None:
        raise ValueError(f"{peer.name} saves no state of its scaler. To start from its rule use `preset({system!r})`.")
    if not isinstance(mapping, bytes | bytearray | memoryview):
        return peer.read(_as_mapping(mapping))
    try:
        return peer.read(_as_mapping(unpickled(bytes(mapping))))
    except TypeError as error:  # bytes are what `import_state` takes, so what is in them is a matter of value
        raise ValueError(str(error)) from error


def export_state(system: str, policy: Policy, state: ScaleState) -> dict[str, Any]:
    """Returns `state` as the mapping that another system loads. Synchronizes with the device of the state.

    Takes that system's presets, and gradscale's own policies where that system can follow them. The bounds that
    `Dynamic` has by default are dropped where it has none; bounds that were chosen are not.

    Args:
        system: name of the system, as for `preset`.
        policy: the rule that the state belongs to.
        state: the state.

    Raises:
        TypeError: the system cannot follow this kind of policy, or the state holds more than one scale.
        ValueError: the system is unknown, loads nothing, or cannot follow the policy's settings.

    >>> policy = preset("torch")
    >>> export_state("torch", policy, policy.start())["scale"]
    65536.0
    """
    peer = _peer(system)
    if peer.write is None:
        raise ValueError(f"{peer.name} loads no state of its scaler from a mapping. Give it the scale as a setting.")
    if not isinstance(state, ScaleState):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`state` must be a ScaleState. Received: {state!r} ({type(state).__name__}).")
    return peer.write(policy, state)


def _peer(system: str) -> Peer:
    name = str(system).strip().lower().replace("_", "-")
    found = PEERS.get(SYSTEM_ALIASES.get(name, name))
    if found is None:
        raise ValueError(f"`system` must be one of {', '.join(PEERS)}. Received: {system!r}.")
    return found


def _as_mapping(saved: Any) -> Mapping[str, Any]:
    """Returns what was saved as a mapping: a bare scaler, or a list, under the key of its checkpoint."""
    if isinstance(saved, Mapping):
        return cast("Mapping[str, Any]", saved)
    if isinstance(saved, StandIn):
        return {"loss_scaler": saved}
    if isinstance(saved, list | tuple):
        return {"optimizer": cast("Sequence[Any]", saved)}
    raise TypeError(
        "`import_state` takes the mapping that a system saved, or the bytes of its pickle. "
        f"Received: {type(saved).__name__}. From a file, `torch.load(path, weights_only=True)` reads the mapping, and "
        "`Path(path).read_bytes()` the bytes."
    )
