"""What not every version of torch has: tests that need it are skipped there, with the version that has it."""

import pytest
import torch
import torch._dynamo
from torch.ao.quantization.utils import check_min_max_valid

from gradscale.torch import compat

needs_grad_dtype = pytest.mark.skipif(not compat.has_grad_dtype(), reason="`Tensor.grad_dtype` is new in torch 2.10")

GATED_ADAGRAD = hasattr(torch.optim.Adagrad([torch.zeros(1, device="cpu")], fused=True), "_step_supports_amp_scaling")
"""Whether fused Adagrad takes `grad_scale` and `found_inf`. Elsewhere it is stepped like any optimizer without them."""

needs_gated_adagrad = pytest.mark.skipif(
    not GATED_ADAGRAD, reason="fused Adagrad takes `grad_scale` and `found_inf` since torch 2.12"
)

TRACES_AUTOGRAD = hasattr(torch._dynamo.config, "trace_autograd_ops")

needs_traced_autograd = pytest.mark.skipif(
    not TRACES_AUTOGRAD, reason="`torch.autograd.grad` can be compiled since torch 2.11"
)

needs_1f1b_on_gloo = pytest.mark.skipif(
    not compat.has_grad_dtype(), reason="torch 2.6 waits for ever in 1F1B with gloo; 2.10 does not"
)

SHARDS_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
"""Whether `fully_shard` runs on a CPU."""

needs_sharding_on_cpu = pytest.mark.skipif(not SHARDS_ON_CPU, reason="`fully_shard` runs on CPU since torch 2.7")


def recompile_limit() -> int:
    """Returns how often `torch.compile` compiles one function, whatever the setting is called."""
    config = torch._dynamo.config
    return config.recompile_limit if hasattr(config, "recompile_limit") else config.cache_size_limit


def _takes_nan_ranges() -> bool:
    try:
        return check_min_max_valid(*torch.full((2, 1), torch.nan, device="cpu"))
    except AssertionError:
        return False


needs_nan_ranges = pytest.mark.skipif(not _takes_nan_ranges(), reason="here the observer itself raises for a NaN range")

needs_batched_view = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::view.dtype", "FuncTorchBatched"),
    reason="`vmap` of `grad` has no rule for `view(dtype)` here, and torch raises",
)

# No feature to look for: the fused kernel of 2.6 divides a copy of a sharded gradient, and that of 2.10 the gradient.
WRITES_SHARDS_BACK = torch.__version__ >= "2.10"


def _takes_groups() -> bool:
    first, second = (torch.zeros(1, device="cpu", requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adagrad([first])
    optimizer.add_param_group({"params": [second]})
    second.grad = torch.zeros(1, device="cpu")
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


ADAGRAD_TAKES_GROUPS = _takes_groups()
"""Whether Adagrad can be stepped once a group was added to it: in torch 2.6 it has no state for it, and raises."""
