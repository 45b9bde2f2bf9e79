"""`MasterWeights`: any optimizer, for FP16 and BF16 parameters, with updates in float32."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.cast import HALF_DTYPES, cast
from gradscale.torch.compat import check_grad_fp32
from gradscale.torch.local import local
from gradscale.torch.masters import saved
from gradscale.torch.masters.chunks import chunks
from gradscale.torch.masters.distributed import set_part
from gradscale.torch.masters.inner_optimizer import Gate, can_be_split, check_inner_optimizer, copy_settings, only
from gradscale.torch.masters.master import Master, made_anew, own_master
from gradscale.torch.masters.step_buffers import StepBuffer, set_gradients
from gradscale.torch.masters.storage import Storage, make_storage

Optimizer = torch.optim.Optimizer


class MasterWeights(Optimizer):
    """An optimizer for FP16 and BF16 parameters that computes in float32 and loses no update.

        model = model.half()
        optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), fused=True))
        scaler = LossScaler(model)
        ...
        scaler.step(optimizer, clip_norm=1.0)

    The inner optimizer holds float32 masters in place of the 16-bit parameters, and has float32 state. Other
    parameters are stepped as usual. Build schedulers on this object: `param_groups` has the model's own parameters and
    all settings. Gradients are cast, unscaled, clipped and applied one part of the model after the other, so that no
    float32 copy of all of them is made.

    The model's weight is the rounded master in every storage. A weight that other code has written to, for instance
    `load_state_dict` of the model, becomes the master at the next step. So does a weight whose dtype has been changed,
    as by `model.half()`: which parameters are 16-bit is found out at every step.

    Masters of DTensors, as FSDP2 and tensor parallelism make them, are DTensors, and each rank updates its own part.

    Args:
        optimizer: the inner optimizer, which does the arithmetic, built on the model's parameters. Step only this
            object from now on.
        storage: how the low bits of the weights are stored. `"fp32"` stores float32 masters, `"remainder"` 16 bits
            beside each weight that make it float32 again, `"kahan"` the rounding error in the weight's own dtype,
            `"stochastic"` nothing: it rounds stochastically, right on average.
        grad_fp32: makes autograd accumulate float32 gradients for the 16-bit parameters. Needed for everything that
            works on unscaled gradients in `.grad`: `unscale_`, `unscaled`, clipping by value.
        seed: of the random numbers of `"stochastic"`; by default taken from torch's.

    Attributes:
        optimizer: the inner optimizer.
        storage: how the low bits are stored.
        grad_fp32: whether the gradients of 16-bit parameters are float32.
    """

    keeps_masters = True
    _step_supports_amp_scaling = True

    def __init__(
        self, optimizer: Optimizer, storage: Storage = "fp32", *, grad_fp32: bool = False, seed: int | None = None
    ) -> None:
        check_grad_fp32(grad_fp32)
        check_inner_optimizer(optimizer)
        self._storage = make_storage(storage, seed)
        self.optimizer = optimizer
        self.storage: Storage = storage
        self.grad_fp32 = grad_fp32
        self._groups: list[list[Master]] = []
        self._loaded: dict[int, Tensor] = {}
        self._value_buffer, self._grad_buffer = StepBuffer(), StepBuffer()
        super().__init__([{**group} for group in optimizer.param_groups], optimizer.defaults)
        self._make_fit()

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of the inner optimizer, by the model's parameters."""
        state = self.optimizer.state
        return {master.weight: state[master.tensor] for master in self._masters() if master.tensor in state}

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Does nothing: the base class sets an empty state, and the inner optimizer has the state."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as for any optimizer; 16-bit parameters get masters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # The base class calls this for the groups that the inner optimizer has already.
        adds = len(self.param_groups) > len(self.optimizer.param_groups)
        if adds:
            try:
                self.optimizer.add_param_group({**group})
            except BaseException:
                self.param_groups.pop()
                raise
        self._groups.append([own_master(weight) for weight in group["params"]])
        if adds:
            self._make_fit()

    def _make_fit(self) -> None:
        """Replaces masters that do not fit their weights, here and in the inner optimizer, with their state."""
        # All are made before the first is replaced: where memory runs out, nothing has been changed.
        made = [
            (masters, index, made_anew(master, self._storage))
            for masters in self._groups
            for index, master in enumerate(masters)
            if not master.fits
        ]
        if not made:
            return
        state = self.optimizer.state
        for masters, index, master in made:
            replaced, masters[index] = masters[index].tensor, master
            if replaced in state:
                state[master.tensor] = cast(state.pop(replaced), torch.float32, HALF_DTYPES)
        for group, masters in zip(self.optimizer.param_groups, self._groups, strict=True):
            # In the inner optimizer's own dict: a wrapper such as SAM shares it with the optimizer inside.
            group["params"] = [master.tensor for master in masters]
        self._set_grad_dtypes(master for _, _, master in made)

    def _set_grad_dtypes(self, masters: Iterable[Master]) -> None:
        """With `grad_fp32`, makes the gradients of 16-bit weights float32, those that are there already too."""
        for weight in (master.weight for master in masters if self.grad_fp32 and master.is_half):
            # torch raises if `grad_dtype` is set while there is a gradient.
            grad, weight.grad = weight.grad, None
            weight.grad_dtype = torch.float32  # type: ignore[attr-defined]
            weight.grad = None if grad is None else grad.float()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates masters and parameters with the gradients of the model, and returns what `closure` returned.

        `grad_scale` and `found_inf`, if a scaler has set them, divide the gradients and skip the step. A fused inner
        optimizer does both in its kernel, and nothing synchronizes; for any other the host synchronizes with the device
        to read `found_inf`. 16-bit gradients are unchanged, still scaled; float32 gradients are divided, as by any
        fused optimizer.
        """
        with torch.enable_grad():
            returned = None if closure is None else closure()
        gate = Gate(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        if gate.known_to_skip:
            return returned
        self._make_fit()
        self._sync()
        # At every step: schedulers write to the groups of this object.
        copy_settings(self.param_groups, self.optimizer.param_groups)
        if can_be_split(self.optimizer):
            for group, chunk in chunks(self._groups):
                if gate.known_to_skip:
                    break
                with only(self.optimizer, group, [master.tensor for master in chunk]):
                    self._step(chunk, gate)
        else:
            self._step([master for master in self._masters() if master.weight.grad is not None], gate)
            # Other optimizers may count steps or adapt their rate in a group.
            copy_settings(self.optimizer.param_groups, self.param_groups)
        if not gate.known_to_skip:
            self._storage.end_step(gate.skip)
        return returned

    def _step(self, masters: Sequence[Master], gate: Gate) -> None:
        """Steps the inner optimizer, which has no other parameters with gradients, and rounds into the weights."""
        half = [master for master in masters if master.is_half]
        if not half:
            gate.step(self.optimizer, [master.tensor for master in masters])
            return
        parameters, tensors = [master.weight for master in half], [master.tensor for master in half]
        weights, stored = list(map(local, parameters)), [local(master.stored) for master in half]
        values = self._storage.read(weights, stored, self._value_buffer)
        try:
            if not self._storage.stores_values:
                # The tensor must stay the same object, by which the inner optimizer finds its state.
                for tensor, value in zip(tensors, values, strict=True):
                    set_part(tensor, value)
            set_gradients(tensors, parameters, self._grad_buffer)
            gate.step(self.optimizer, [master.tensor for master in masters])
            if not gate.known_to_skip:
                self._storage.write(values, weights, stored, parameters)
        finally:
            # The buffers are reused for the next chunk, so that masters must not refer to them.
            for tensor in tensors:
                tensor.grad = None
                if not self._storage.stores_values:
                    set_part(tensor, local(tensor).new_empty(0))
        for master in half:
            master.note_weight()

    def _sync(self) -> None:
        """Applies masters that were loaded, and updates masters of weights that other code has written to."""
        for index, master in enumerate(self._masters()):
            if master.is_half:
                master.sync(self._storage, self._loaded.get(index))
        self._loaded = {}

    @torch.no_grad()
    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields every parameter of the model with its value in float32; a wider parameter with itself.

        They are the values that the next step starts from, and for reading only: copies, or with `"fp32"` mostly the
        masters themselves.
        """
        for index, master in enumerate(self._masters()):
            yield master.weight, master.value(self._storage, self._loaded.get(index))

    @torch.no_grad()
    def sync_from_model(self) -> None:
        """Makes all masters again from the model's weights.

        Only needed after writes that torch does not count, such as `parameter.data.copy_(...)`: others are detected.
        """
        self._make_fit()
        self._loaded = {}
        for master in self._masters():
            if master.is_half:
                local(master.stored).copy_(self._storage.store(local(master.weight)))
                master.note_weight()

    @torch.no_grad()
    def refine(self, values: Mapping[Tensor, Tensor]) -> None:
        """Sets masters to float32 values, by the model's parameters, where these round to the weight.

        For weights that were float32 before a cast: masters made from the cast weights have lost the low bits.
        """
        for master in self._masters():
            if master.is_half and master.weight in values:
                self._storage.restore(local(values[master.weight]), local(master.weight), local(master.stored))
                master.note_weight()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the inner optimizer and the masters, in float32 whatever the storage.

        Resuming from it is bit-exact. A plain optimizer can load it too, and so can another storage.
        """
        values = {
            index: value.detach() for index, (weight, value) in enumerate(self.masters()) if weight.dtype in HALF_DTYPES
        }
        return saved.with_masters(super().state_dict(), values, self.storage, self._storage.state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state of this class or of a plain optimizer, before or after the model's.

        The model's weights are not written to. A saved master is used where it rounds to the weight, which it does
        everywhere if the model is loaded from the same checkpoint before the next step. Elsewhere, and for a plain
        optimizer's state, the weight is the master.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._load(state_dict)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        self._make_fit()
        masters = list(self._masters())
        values = saved.masters_in(state_dict, masters)
        self.optimizer.load_state_dict(saved.without_masters(state_dict))
        copy_settings(self.optimizer.param_groups, self.param_groups)
        self.sync_from_model()
        if saved.KEY in state_dict:
            self._storage.load(state_dict[saved.KEY]["storage_state"])
        # Applied at the next step: only then is it certain that the model has been loaded as well.
        self._loaded = saved.on_device(values, masters)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy or a pickle, without attributes set by schedulers and hooks."""
        return {name: self.__dict__[name] for name in _FIELDS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_grad_fp32(state["grad_fp32"])
        super().__setstate__(state)
        # Copies of weights have lost their `grad_dtype`.
        self._set_grad_dtypes(self._masters())

    def _masters(self) -> Iterator[Master]:
        return chain.from_iterable(self._groups)


_FIELDS = (
    "_grad_buffer",
    "_groups",
    "_loaded",
    "_storage",
    "_value_buffer",
    "defaults",
    "grad_fp32",
    "optimizer",
    "param_groups",
    "storage",
)
