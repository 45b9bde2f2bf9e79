"""`MasterWeights`: any optimizer, for FP16 and BF16 parameters, with updates in float32."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.torch.cast import HALF_DTYPES, cast
from gradscale.torch.compat import check_grad_fp32
from gradscale.torch.local import local
from gradscale.torch.masters.inner_optimizer import Gate, check_inner_optimizer, copy_settings, parts, set_gradients
from gradscale.torch.masters.master import Master, made_anew, set_part
from gradscale.torch.masters.storage import StepBuffer, Storage, make_storage

KEY, VALUE, VERSION = "masters", "master", 1
"""In a saved state: the key of the entry of masters, that of a value in the state of a parameter, and the version."""


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
        self._groups.append([Master(weight, weight, weight, weight.dtype) for weight in group["params"]])
        if adds:
            self._make_fit()

    def _make_fit(self) -> None:
        """Replaces masters that do not fit their weights, here and in the inner optimizer, with their state."""
        unfit = [(masters, index) for masters in self._groups for index, each in enumerate(masters) if not each.fits]
        if not unfit:
            return
        # All are made before the first is replaced: where memory runs out, nothing has been changed.
        made = [made_anew(masters[index], self._storage) for masters, index in unfit]
        state = self.optimizer.state
        for (masters, index), master in zip(unfit, made, strict=True):
            replaced, masters[index] = masters[index].tensor, master
            if replaced in state:
                state[master.tensor] = cast(state.pop(replaced), torch.float32, HALF_DTYPES)
        for group, masters in zip(self.optimizer.param_groups, self._groups, strict=True):
            # In the inner optimizer's own dict: a wrapper such as SAM shares it with the optimizer inside.
            group["params"] = [master.tensor for master in masters]
        self._set_grad_dtypes()

    def _set_grad_dtypes(self) -> None:
        """With `grad_fp32`, makes the gradients of 16-bit weights float32, those that are there already too."""
        for weight in (master.weight for master in self._halves() if self.grad_fp32):
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
        if gate.skips:
            return returned
        self._make_fit()
        for master in self._halves():
            master.sync(self._storage)
        # At every step: schedulers write to the groups of this object.
        copy_settings(self.param_groups, self.optimizer.param_groups)
        for group, masters in parts(self.optimizer, self._groups):
            if not gate.skips:
                self._step(group, masters, gate)
        # Optimizers other than torch's may count steps or adapt their rate in a group.
        copy_settings(self.optimizer.param_groups, self.param_groups)
        if not gate.skips:
            self._storage.end_step(gate.skip)
        return returned

    def _step(self, group: int | None, masters: Sequence[Master], gate: Gate) -> None:
        """Steps the inner optimizer on these parameters alone, of one group or of all, and rounds into the weights."""
        half = [master for master in masters if master.is_half]
        parameters, tensors = [master.weight for master in half], [master.tensor for master in half]
        weights, stored = list(map(local, parameters)), [local(master.stored) for master in half]
        values = self._storage.read(weights, stored, self._value_buffer) if half else ()
        groups, stepped = self.optimizer.param_groups, [master.tensor for master in masters]
        try:
            if not self._storage.stores_values:
                # The tensor must stay the same object, by which the inner optimizer finds its state.
                for tensor, value in zip(tensors, values, strict=True):
                    set_part(tensor, value)
            set_gradients(tensors, parameters, self._grad_buffer)
            if group is not None:
                self.optimizer.param_groups = [{**groups[group], "params": stepped}]
            gate.step(self.optimizer, stepped)
            if half and not gate.skips:
                self._storage.write(values, weights, stored, parameters)
        finally:
            if group is not None:
                self.optimizer.param_groups = groups
            # The buffers are reused for the next chunk, so that masters must not refer to them.
            for tensor in tensors:
                tensor.grad = None
                if not self._storage.stores_values:
                    set_part(tensor, local(tensor).new_empty(0))
        for master in half:
            master.note_weight()

    @torch.no_grad()
    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields every parameter of the model with its value in float32; a wider parameter with itself.

        They are the values that the next step starts from, and for reading only: copies, or with `"fp32"` mostly the
        masters themselves.
        """
        for master in self._masters():
            yield master.weight, master.value(self._storage)

    @torch.no_grad()
    def sync_from_model(self) -> None:
        """Makes all masters again from the model's weights.

        Only needed after writes that torch does not count, such as `parameter.data.copy_(...)`: others are detected.
        """
        self._make_fit()
        for master in self._halves():
            local(master.stored).copy_(self._storage.store(local(master.weight)))
            master.note_weight()

    @torch.no_grad()
    def refine(self, values: Mapping[Tensor, Tensor]) -> None:
        """Sets masters to float32 values, by the model's parameters, where these round to the weight.

        For weights that were float32 before a cast: masters made from the cast weights have lost the low bits.
        """
        for master in self._halves():
            if master.weight in values:
                master.loaded = values[master.weight]
                master.sync(self._storage)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the inner optimizer and the masters, in float32 whatever the storage.

        Resuming from it is bit-exact. A plain optimizer can load it too, and so can another storage.
        """
        # A value is saved beside the inner optimizer's state of its parameter, as if it were part of it. There
        # `torch.distributed.checkpoint` finds it, which renames parameters and drops entries that it does not know.
        # Where there is no such state, it is in an entry of its own: an optimizer takes a state it finds as complete.
        saved = super().state_dict()
        state, values = dict(saved["state"]), {}
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        for index, (key, (weight, value)) in enumerate(zip(keys, self.masters(), strict=False)):
            if weight.dtype in HALF_DTYPES and state.get(key):
                state[key] = {**state[key], VALUE: value.detach()}
            elif weight.dtype in HALF_DTYPES:
                values[index] = value.detach()
        own = {"version": VERSION, "storage": self.storage, "values": values, "storage_state": self._storage.state()}
        return {**saved, "state": state, KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state of this class or of a plain optimizer, before or after the model's.

        The model's weights are not written to. A saved master is used where it rounds to the weight, which it does
        everywhere if the model is loaded from the same checkpoint before the next step. Elsewhere, and for a plain
        optimizer's state, the weight is the master.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._make_fit()
        loaded = _masters_in(state_dict, list(self._masters()))
        of_inner = {name: value for name, value in state_dict.items() if name != KEY}
        of_inner["state"] = {
            key: {name: value for name, value in each.items() if name != VALUE} if isinstance(each, Mapping) else each
            for key, each in state_dict["state"].items()
        }
        self.optimizer.load_state_dict(of_inner)
        copy_settings(self.optimizer.param_groups, self.param_groups)
        self.sync_from_model()
        self._storage.load(state_dict.get(KEY, {}).get("storage_state", {}))
        # Applied at the next step: only then is it certain that the model has been loaded as well.
        for master, value in loaded:
            master.loaded = value
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy or a pickle, without attributes set by schedulers and hooks."""
        fields = ("_groups", "_storage", "defaults", "grad_fp32", "optimizer", "param_groups", "storage")
        return {name: vars(self)[name] for name in fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_grad_fp32(state["grad_fp32"])
        super().__setstate__(state)
        self._value_buffer, self._grad_buffer = StepBuffer(), StepBuffer()
        # Copies of weights have lost their `grad_dtype`.
        self._set_grad_dtypes()

    def _masters(self) -> Iterator[Master]:
        return chain.from_iterable(self._groups)

    def _halves(self) -> Iterator[Master]:
        return (master for master in self._masters() if master.is_half)


def _masters_in(state_dict: dict[str, Any], masters: Sequence[Master]) -> list[tuple[Master, Tensor]]:
    """Returns masters with copies of their values in a saved state, distributed as the parameters are.

    There are none in a plain optimizer's. Raises unless there are values for exactly the 16-bit parameters, each in its
    shape. Without the entry, which `torch.distributed.checkpoint` drops together with the state of frozen parameters,
    there may be fewer.
    """
    state, entry = state_dict["state"], state_dict.get(KEY)
    states = [state.get(key) for group in state_dict["param_groups"] for key in group["params"]]
    values = {index: each[VALUE] for index, each in enumerate(states) if isinstance(each, Mapping) and VALUE in each}
    if entry is not None:
        if not isinstance(entry, Mapping):
            kind = type(entry).__name__
            raise TypeError(f"Saved masters must be a dict, as `state_dict` returns it. Received: {kind}.")
        if entry.get("version") != VERSION:
            raise ValueError(
                f"Saved masters must be of version {VERSION}. Received: version={entry.get('version')!r}. "
                "Load them with the gradscale that saved them, or a newer one."
            )
        rest = entry.get("values")
        tensors = isinstance(rest, Mapping) and all(isinstance(value, Tensor) for value in rest.values())
        if not tensors or not isinstance(entry.get("storage_state"), Mapping):
            raise ValueError(
                "Saved masters must have `values`, a dict of tensors, and `storage_state`, a dict. "
                f"Received: {', '.join(f'{name}: {type(part).__name__}' for name, part in entry.items())}. Load what "
                "`state_dict` returned."
            )
        values |= entry["values"]
    if not all(isinstance(value, Tensor) for value in values.values()):
        kinds = ", ".join(type(value).__name__ for value in values.values())
        raise ValueError(f"Saved masters must be tensors. Received: {kinds}.")
    wanted = {index: tuple(master.weight.shape) for index, master in enumerate(masters) if master.is_half}
    found = {index: tuple(value.shape) for index, value in values.items()}
    needed = found if entry is None else wanted | found
    if wrong := sorted(index for index in needed if wanted.get(index) != found.get(index)):
        index = wrong[0]
        raise ValueError(
            "Saved masters must fit the 16-bit parameters of the optimizer, one by one. "
            f"Parameter {index} has shape {wanted.get(index)}, and its saved master {found.get(index)}. "
            "Build the optimizer on the same model, in the same dtype, as when it was saved."
        )
    return [(masters[index], _copy_for(masters[index].weight, value)) for index, value in values.items()]


def _copy_for(weight: Any, value: Any) -> Tensor:
    """Returns a saved value, which may be distributed in another way or not at all, distributed as the weight is."""
    # Copied in any case: it is used at the next step, and the caller may change the dict before.
    value = value.detach().to(weight.device, torch.float32, copy=True)
    if not hasattr(weight, "to_local"):
        return value.full_tensor() if hasattr(value, "to_local") else value
    if hasattr(value, "to_local"):
        return value.redistribute(weight.device_mesh, weight.placements)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, weight.device_mesh, weight.placements)
