"""`MasterWeights`: any optimizer, for FP16 and BF16 parameters, with updates in float32."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.kernels.torch import tensor_groups
from gradscale.kernels.torch_storage import Storage, make_storage
from gradscale.torch.cast import HALF_DTYPES, cast
from gradscale.torch.compat import check_grad_fp32
from gradscale.torch.gradients import local, parameters_of, values_of
from gradscale.torch.host import host_value, to_device
from gradscale.torch.masters.master import Master, copied_for, distributed_as, made_anew, set_part, value_of
from gradscale.torch.step import apply

CHUNK_ON_CPU, CHUNK = 2**21, 2**25
"""Elements stepped at once, except that a tensor is never split. On the CPU few enough to stay in its caches between
the passes; elsewhere enough to keep a device busy, and still few beside a model."""

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
        _check_inner(optimizer)
        self._storage = make_storage(storage, seed)
        self.optimizer = optimizer
        self.storage: Storage = storage
        self.grad_fp32 = grad_fp32
        self._masters: dict[Tensor, Master] = {}
        super().__init__([{**group} for group in optimizer.param_groups], optimizer.defaults)
        self._make_fit()

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of the inner optimizer, by the model's parameters."""
        state = self.optimizer.state
        held = ((weight, self._held(weight)) for weight in parameters_of([self]))
        return {weight: state[tensor] for weight, tensor in held if tensor in state}

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Does nothing: the base class sets an empty state, and the inner optimizer has the state."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as for any optimizer; 16-bit parameters get masters."""
        super().add_param_group(param_group)
        # The base class calls this for the groups that the inner optimizer has already.
        if len(self.param_groups) > len(self.optimizer.param_groups):
            try:
                self.optimizer.add_param_group({**self.param_groups[-1]})
            except BaseException:
                self.param_groups.pop()
                raise
            self._make_fit()

    def _held(self, weight: Tensor) -> Tensor:
        """Returns what the inner optimizer holds in place of a parameter."""
        return self._masters[weight].tensor if weight in self._masters else weight

    def _make_fit(self) -> None:
        """Makes the masters of weights that have become 16-bit, drops those of others, and moves their state along."""
        unfit = {
            weight: self._held(weight)
            for weight in parameters_of([self])
            if not (self._masters[weight].fits if weight in self._masters else weight.dtype not in HALF_DTYPES)
        }
        if not unfit:
            return
        # All are made before the first is replaced: where memory runs out, nothing has been changed.
        half = [weight for weight in unfit if weight.dtype in HALF_DTYPES]
        masters = self._masters | {each: made_anew(each, self._masters.get(each), self._storage) for each in half}
        self._masters = {weight: master for weight, master in masters.items() if weight.dtype in HALF_DTYPES}
        state = self.optimizer.state
        for weight, replaced in unfit.items():
            if replaced in state:
                state[self._held(weight)] = cast(state.pop(replaced), torch.float32, HALF_DTYPES)
        for inner, group in zip(self.optimizer.param_groups, self.param_groups, strict=True):
            # In the inner optimizer's own dict: a wrapper such as SAM shares it with the optimizer inside.
            inner["params"] = [self._held(weight) for weight in group["params"]]
        self._set_grad_dtypes()

    def _set_grad_dtypes(self) -> None:
        """With `grad_fp32`, makes the gradients of 16-bit weights float32, those that are there already too."""
        for weight in self._masters if self.grad_fp32 else ():
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
        divisor, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        known = None if skip is None else host_value(skip)
        if known:
            return returned
        skip = skip if known is None else None  # kernels that take it read it for every parameter
        self._make_fit()
        for master in self._masters.values():
            master.sync(self._storage)
        # At every step: schedulers write to the groups of this object.
        _copy_settings(self.param_groups, self.optimizer.param_groups)
        groups, borrows = self.optimizer.param_groups, not self._storage.stores_values
        for group, weights in _parts(self.optimizer, self.param_groups):
            half = [self._masters[weight] for weight in weights if weight in self._masters]
            parameters, tensors = [master.weight for master in half], [master.tensor for master in half]
            here, stored = list(map(local, parameters)), [local(master.stored) for master in half]
            values = self._storage.read(here, stored) if half else ()
            try:
                # The tensor must stay the same object, by which the inner optimizer finds its state.
                for index, tensor in enumerate(tensors if borrows else ()):
                    set_part(tensor, values[index])
                _set_gradients(tensors, parameters)
                stepped = list(map(self._held, weights))
                if group is not None:
                    self.optimizer.param_groups = [{**groups[group], "params": stepped}]
                if apply.folds(self.optimizer):
                    apply.step_folded(self.optimizer, divisor, skip)
                else:
                    # Read once for all parts: none is stepped while another is skipped.
                    if skip is not None and skip.item():
                        break
                    skip = None
                    if divisor is not None:
                        _divide(stepped, divisor)
                    apply.step_unfolded(self.optimizer)
                if half:
                    self._storage.write(values, here, stored, parameters)
            finally:
                if group is not None:
                    self.optimizer.param_groups = groups
                # The memory is free before the next part needs as much.
                for tensor in tensors:
                    tensor.grad = None
                    if borrows:
                        set_part(tensor, local(tensor).new_empty(0))
                del values
            for master in half:
                master.note_weight()
        # Optimizers other than torch's may count steps or adapt their rate in a group.
        _copy_settings(self.optimizer.param_groups, self.param_groups)
        self._storage.end_step(skip)
        return returned

    @torch.no_grad()
    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields every parameter of the model with its value in float32; a wider parameter with itself.

        They are the values that the next step starts from, and for reading only: copies, or with `"fp32"` mostly the
        masters themselves.
        """
        for weight in parameters_of([self]):
            yield weight, value_of(weight, self._masters.get(weight), self._storage)

    @torch.no_grad()
    def sync_from_model(self) -> None:
        """Makes all masters again from the model's weights.

        Only needed after writes that torch does not count, such as `parameter.data.copy_(...)`: others are detected.
        """
        self._make_fit()
        for master in self._masters.values():
            local(master.stored).copy_(self._storage.store(local(master.weight)))
            master.note_weight()

    @torch.no_grad()
    def refine(self, values: Mapping[Tensor, Tensor]) -> None:
        """Sets masters to float32 values, by the model's parameters, where these round to the weight.

        For weights that were float32 before a cast: masters made from the cast weights have lost the low bits.
        """
        for weight, master in self._masters.items():
            if weight in values:
                master.loaded = values[weight]
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
        loaded = _values_in(state_dict, list(parameters_of([self])))
        of_inner = {name: value for name, value in state_dict.items() if name != KEY}
        of_inner["state"] = {
            key: {name: value for name, value in each.items() if name != VALUE} if isinstance(each, Mapping) else each
            for key, each in state_dict["state"].items()
        }
        self.optimizer.load_state_dict(of_inner)
        _copy_settings(self.optimizer.param_groups, self.param_groups)
        self.sync_from_model()
        self._storage.load(state_dict.get(KEY, {}).get("storage_state", {}))
        # Applied at the next step: only then is it certain that the model has been loaded as well.
        for weight, value in loaded.items():
            self._masters[weight].loaded = value
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents of a copy or a pickle, without attributes set by schedulers and hooks."""
        fields = ("_masters", "_storage", "defaults", "grad_fp32", "optimizer", "param_groups", "storage")
        return {name: vars(self)[name] for name in fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_grad_fp32(state["grad_fp32"])
        super().__setstate__(state)
        # Copies of weights have lost their `grad_dtype`.
        self._set_grad_dtypes()


def _check_inner(optimizer: Any) -> None:
    """Raises unless this is an optimizer that can be stepped on masters."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "`optimizer` must be a torch optimizer built on the model's parameters. "
            f"Received: {type(optimizer).__name__}."
        )
    if getattr(optimizer, "keeps_masters", False):
        raise TypeError("`optimizer` keeps masters already. Wrap an optimizer once.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS evaluates the loss itself, between its own updates of the parameters, and cannot be stepped on "
            "masters. Keep the model's parameters in float32 for it."
        )
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            "A scheduler has been built on this optimizer, and `MasterWeights` would not see its changes. "
            "Build it on the `MasterWeights` instead, after wrapping."
        )


def _parts(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int | None, list[Tensor]]]:
    """Yields the parameters that have gradients in chunks of one group and one device, each with its group.

    They are stepped one after the other, so that temporary float32 memory stays small. That is the same as stepping on
    all at once for torch's own optimizers, which treat each parameter separately. Others may count steps in a group, or
    use all gradients together; and a hook expects to be called once. For them all parameters are one part, of no group.

    DTensors and plain parameters, which torch's multi-tensor kernels do not take together, are in different chunks.
    """
    with_gradients = [[weight for weight in group["params"] if weight.grad is not None] for group in groups]
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if hooked or not type(optimizer).__module__.startswith("torch.optim."):
        yield None, list(chain.from_iterable(with_gradients))
        return
    for group, weights in enumerate(with_gradients):
        for _, alike in groupby(weights, lambda weight: (weight.device, getattr(weight, "device_mesh", None))):
            chunk, elements = [], 0
            for weight in alike:
                count = local(weight).numel()
                elements += count
                if chunk and elements > (CHUNK_ON_CPU if weight.is_cpu else CHUNK):
                    yield group, chunk
                    chunk, elements = [], count
                chunk.append(weight)
            yield group, chunk


def _set_gradients(masters: Sequence[Tensor], weights: Sequence[Any]) -> None:
    """Sets the gradient of every master to that of its weight: the same tensor if it is float32, else a cast.

    One multi-tensor kernel casts all that need it. A sparse gradient is cast separately.
    """
    to_cast: list[tuple[Tensor, Tensor]] = []
    for master, weight in zip(masters, weights, strict=True):
        if hasattr(weight.grad, "placements") and weight.grad.placements != weight.placements:
            # Each rank may hold the whole of it.
            weight.grad = weight.grad.redistribute(placements=weight.placements)
        grad = weight.grad
        if grad.layout is not torch.strided:
            master.grad = grad.float()
        elif grad.dtype is torch.float32 and local(grad).stride() == local(master).stride():
            master.grad = grad
        else:
            to_cast.append((master, grad))
    if to_cast:
        # In the layout of the masters, which fused kernels need.
        cast = [torch.empty_like(local(master), dtype=torch.float32) for master, _ in to_cast]
        torch._foreach_copy_(cast, [local(grad) for _, grad in to_cast])  # pyright: ignore[reportPrivateImportUsage]
        for (master, grad), part in zip(to_cast, cast, strict=True):
            master.grad = distributed_as(grad, part)


def _divide(parameters: Sequence[Tensor], divisor: Tensor) -> None:
    """Divides the gradients of `parameters`. Does not synchronize."""
    # As in fused kernels: a product with the inverse rounds twice where the divisor is no power of two.
    for group in tensor_groups([values_of(each, each.grad) for each in parameters]):  # type: ignore[arg-type]
        here = to_device(divisor, group.device)
        torch._foreach_div_(group.tensors, here)  # pyright: ignore[reportPrivateImportUsage]


def _copy_settings(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copies learning rates and other settings from one optimizer's groups to another's."""
    for given, group in zip(source, target, strict=True):
        group.update({name: value for name, value in given.items() if name not in ("params", "param_names")})


def _values_in(state_dict: dict[str, Any], weights: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Returns copies of the masters in a saved state, by the weights, and distributed as these are.

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
    wanted = {index: tuple(each.shape) for index, each in enumerate(weights) if each.dtype in HALF_DTYPES}
    found = {index: tuple(value.shape) for index, value in values.items()}
    needed = found if entry is None else wanted | found
    if wrong := sorted(index for index in needed if wanted.get(index) != found.get(index)):
        index = wrong[0]
        raise ValueError(
            "Saved masters must fit the 16-bit parameters of the optimizer, one by one. "
            f"Parameter {index} has shape {wanted.get(index)}, and its saved master {found.get(index)}. "
            "Build the optimizer on the same model, in the same dtype, as when it was saved."
        )
    return {weights[index]: copied_for(weights[index], value) for index, value in values.items()}
