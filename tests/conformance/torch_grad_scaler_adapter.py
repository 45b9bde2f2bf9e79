"""The drop-in for torch's GradScaler in the conformance table, in the loop that torch's documentation shows."""

from collections.abc import Mapping
from typing import Any

import torch  # noqa: TID253
from tests.conformance.adapters import NO_TABLES, Array, Difference, Step
from tests.conformance.torch_adapter import FOREACH_TYPES, FUSED_TYPES, PLAIN_TYPES, Model

from gradscale import Dynamic, Policy
from gradscale.torch import GradScaler


class GradScalerSession:
    def __init__(self, policy: Policy | str, params: Mapping[str, Array], lr: float, kind: Mapping[str, bool]) -> None:
        self._model = Model(params, lr, kind)
        self._scaler = GradScaler("cpu", policy=policy)

    def step(self, grads: Mapping[str, Array | None], *, clip_norm: float | None = None, loss: float = 1.0) -> Step:
        scaler, optimizer = self._scaler, self._model.optimizer
        scaler.scale(self._model.loss(loss)).backward()
        self._model.give(grads)
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self._model.params.values(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        return self._model.after(scaler.last)

    def state(self) -> dict[str, Any]:
        return {"scale": self._scaler.get_scale(), "clean_steps": self._scaler.state_dict().get("_growth_tracker")}

    def metrics(self) -> None:
        return None


class GradScalerAdapter:
    sampled = NO_TABLES
    differs: Mapping[Difference, str] = {
        "losses": "torch's GradScaler applies finite gradients, whatever the loss",
        "no grads": "torch's GradScaler raises where no optimizer has gradients",
        "no scaling": "NoScaling() is `enabled=False`: the optimizer is called and nothing else is done",
        "norm": "torch's loop clips with `clip_grad_norm_`, which returns the norm to the user",
        "state": "torch's GradScaler counts no more than the clean steps",
        "metrics": "torch's GradScaler has none",
    }

    def __init__(self, dtypes: frozenset[str], **kind: bool) -> None:
        self.dtypes = dtypes
        self._kind = kind

    def open(self, policy: Policy | str, params: Mapping[str, Array], lr: float) -> GradScalerSession:
        return GradScalerSession(policy, params, lr, self._kind)

    def default(self) -> Policy:
        scaler = GradScaler("cpu")
        return Dynamic(
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
        )


ADAPTER = GradScalerAdapter(PLAIN_TYPES, foreach=False)
FOREACH = GradScalerAdapter(FOREACH_TYPES, foreach=True)
FUSED = GradScalerAdapter(FUSED_TYPES, fused=True)
