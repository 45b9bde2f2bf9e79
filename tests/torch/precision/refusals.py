"""A check that a refused `prepare` has changed nothing."""

from typing import Any

import pytest
import torch
from torch import nn

from gradscale.torch import prepare


def snapshot(*models: nn.Module) -> list[Any]:
    """Returns what `prepare` could change: classes, attributes, and the memory and dtype of every tensor."""
    return [
        [(type(part), sorted(vars(part))) for model in models for part in model.modules()],
        [(value.dtype, value.data_ptr()) for model in models for value in model.state_dict().values()],
    ]


def refused(
    error: type[Exception], message: str, model: Any, optimizer: Any, precision: Any = "O2", *watched: nn.Module
) -> None:
    """Checks that the call raises with this message, and that models and optimizers are as they were."""
    models = [model] if isinstance(model, nn.Module) else model
    before = snapshot(*models, *watched)
    state = optimizer.state_dict() if isinstance(optimizer, torch.optim.Optimizer) else None
    with pytest.raises(error, match=message):
        prepare(model, optimizer, precision)
    assert snapshot(*models, *watched) == before
    assert state is None or optimizer.state_dict() == state
