"""The part of a distributed tensor that this rank holds."""

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """Returns the shard or replica of a DTensor that this rank holds, in the same memory; any other tensor itself."""
    # By the method, not the class: importing `torch.distributed.tensor` takes a second.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]
