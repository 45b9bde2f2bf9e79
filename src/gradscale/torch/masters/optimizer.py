"""`MasterWeights`: any optimizer, for FP16 and BF16 parameters, with updates in float32."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.masters import saved
from gradscale.torch.masters.checks import check_inside
from gradscale.torch.masters.inside import Gate, can_be_split, copy_settings, only
from gradscale.torch.masters.lending import lend_gradients, lend_values, take_back
from gradscale.torch.masters.scratch import Scratch
from gradscale.torch.masters.slot import Slot, slot_for
from gradscale.torch.masters.ways import Kind, way_for

Optimizer = torch.optim.Optimizer

PART_ON_CPU, PART = 2**21, 2**25
"""Elements stepped at once, largest tensors aside. On the CPU few enough to stay in its caches between the passes;
elsewhere many enough to keep a device busy, and still small beside a model."""


class MasterWeights(Optimizer):
    """An optimizer for FP16 and BF16 parameters that computes in float32 and loses no update.

        model = model.half()
        optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), fused=True))
        scaler = LossScaler(model)
        ...
        scaler.step(optimizer, clip_norm=1.0)

    The optimizer inside holds float32 masters in place of the 16-bit parameters, and has float32 state. Other
    parameters are stepped as ever. Build schedulers on this object: `param_groups` has the model's own parameters and
    all settings. Gradients are cast, unscaled, clipped and used one part of the model after the other, so that no
    float32 copy of all of them is made.

    Every kind of master has the model's weight as its rounding. A weight that somebody else has written to, such as
    `load_state_dict` of the model, is taken over at the next step.

    Args:
        optimizer: the one that does the arithmetic, built on the model's parameters. From now on this object steps it.
        kind: how the low bits are kept. `"fp32"` keeps float32 masters, `"remainder"` 16 bits beside each weight that
            make it float32 again, `"kahan"` the rounding error in the weight's own type, `"stochastic"` nothing: it
            rounds at random, right on average.
        grad_fp32: makes autograd accumulate float32 gradients for the 16-bit parameters. Needed for what edits `.grad`
            in true units: `unscale_`, `unscaled`, clipping by value.
        seed: of the random numbers of `"stochastic"`; by default taken from torch's.

    Attributes:
        optimizer: the one inside.
        kind: how the low bits are kept.
        grad_fp32: whether the gradients of 16-bit parameters are float32.
    """

    keeps_masters = True
    _step_supports_amp_scaling = True

    def __init__(
        self, optimizer: Optimizer, kind: Kind = "fp32", *, grad_fp32: bool = False, seed: int | None = None
    ) -> None:
        check_inside(optimizer)
        self._way = way_for(kind, seed)
        self.optimizer = optimizer
        self.kind: Kind = kind
        self.grad_fp32 = grad_fp32
        self._slots: list[list[Slot]] = []
        self._loaded: dict[int, Tensor] = {}
        self._value_room, self._grad_room = Scratch(), Scratch()
        groups, optimizer.param_groups = optimizer.param_groups, []
        super().__init__(groups, optimizer.defaults)

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of the optimizer inside, by the model's parameters."""
        inside = self.optimizer.state
        return {slot.weight: inside[slot.master] for slot in self._all_slots() if slot.master in inside}

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Ignores what the base class sets before there are parameters: the optimizer inside has the state."""

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as for any optimizer; 16-bit ones get masters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        slots = [slot_for(weight, self._way) for weight in group["params"]]
        self.optimizer.add_param_group({**group, "params": [slot.master for slot in slots]})
        self._slots.append(slots)
        self._widen(slots)

    def _widen(self, slots: Sequence[Slot]) -> None:
        """Makes float32 what belongs to 16-bit weights: state from before, and gradients where that was asked for."""
        inside = self.optimizer.state
        for slot in slots:
            if slot.narrow and slot.weight in inside:
                inside[slot.master] = saved.widened(inside.pop(slot.weight))
            if slot.narrow and self.grad_fp32:
                _accumulate_in_float32(slot.weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates masters and parameters with the gradients of the model, and returns what `closure` did.

        `grad_scale` and `found_inf`, where a scaler has set them, divide the gradients and skip the step. A fused
        optimizer inside takes both into its kernel, and nothing waits; for any other the host waits for `found_inf`.
        16-bit gradients are left as they were, still scaled; float32 ones are divided, as by any fused optimizer.
        """
        with torch.enable_grad():
            returned = None if closure is None else closure()
        gate = Gate(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        if gate.known_closed:
            return returned
        self._settle()
        copy_settings(self.param_groups, self.optimizer.param_groups)
        if can_be_split(self.optimizer):
            for group, part in self._parts():
                with only(self.optimizer, group, [slot.master for slot in part]):
                    self._step(part, gate)
        else:
            self._step([slot for slot in self._all_slots() if slot.weight.grad is not None], gate)
            copy_settings(self.optimizer.param_groups, self.param_groups)
        return returned

    def _parts(self) -> Iterator[tuple[int, list[Slot]]]:
        """Yields the parameters that have gradients in parts of one group and one device, each with its group."""
        for group, slots in enumerate(self._slots):
            part: list[Slot] = []
            elements = 0
            for slot in slots:
                weight = slot.weight
                if weight.grad is None:
                    continue
                most = PART_ON_CPU if weight.is_cpu else PART
                if part and (elements + weight.numel() > most or part[-1].weight.device != weight.device):
                    yield group, part
                    part, elements = [], 0
                part.append(slot)
                elements += weight.numel()
            if part:
                yield group, part

    def _step(self, slots: Sequence[Slot], gate: Gate) -> None:
        """Steps the optimizer inside, which has no other parameters with gradients, and rounds into the weights."""
        narrow = [slot for slot in slots if slot.narrow]
        if not narrow:
            gate.step(self.optimizer, [slot.master for slot in slots])
            return
        weights, kept = [slot.weight for slot in narrow], [slot.kept for slot in narrow]
        values = self._way.read(weights, kept, self._value_room)
        lent = not self._way.holds_values
        try:
            if lent:
                lend_values(narrow, values)
            lend_gradients(narrow, self._grad_room)
            gate.step(self.optimizer, [slot.master for slot in slots])
            self._way.write(values, weights, kept)
        finally:
            take_back(narrow, values=lent)
        for slot in narrow:
            slot.leave()

    def _settle(self) -> None:
        """Takes over what was loaded, and weights that somebody else has written to."""
        for index, slot in enumerate(self._all_slots()):
            if index in self._loaded:
                self._way.restore(self._loaded[index], slot.weight, slot.kept)
            elif slot.narrow and not slot.untouched:
                self._way.adopt(slot.weight, slot.kept)
            else:
                continue
            slot.leave()
        self._loaded = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's parameters."""
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields every parameter of the model with its value in float32; a wider one with itself.

        With `"fp32"` these are the masters themselves, and with other kinds copies.
        """
        self._settle()
        for slot in self._all_slots():
            if not slot.narrow or self._way.holds_values:
                yield slot.weight, slot.master
            else:
                yield slot.weight, self._way.read([slot.weight], [slot.kept], Scratch())[0]

    @torch.no_grad()
    def sync_from_model(self) -> None:
        """Makes all masters anew from the model's weights.

        Only needed after writes that torch does not count, such as `parameter.data.copy_(...)`: others are noticed.
        """
        self._loaded = {}
        for slot in self._all_slots():
            if slot.narrow:
                slot.kept.copy_(self._way.keep(slot.weight))
                slot.leave()

    @torch.no_grad()
    def refine(self, values: Mapping[Tensor, Tensor]) -> None:
        """Takes over float32 values, by the model's parameters, wherever the weight is what they round to.

        For weights that were float32 until they were cast: masters made of the cast ones have lost the rest.
        """
        for slot in self._all_slots():
            if slot.narrow and slot.weight in values:
                self._way.restore(values[slot.weight], slot.weight, slot.kept)
                slot.leave()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer inside and the masters, in float32 whatever the kind.

        To go on from it is bit for bit the same. A plain optimizer can load it too, and so can another kind.
        """
        places = {id(slot.weight): index for index, slot in enumerate(self._all_slots()) if slot.narrow}
        values = {places[id(weight)]: value.detach() for weight, value in self.masters() if id(weight) in places}
        return super().state_dict() | {saved.KEY: saved.entry_of(values, self.kind, self._way.state())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a saved state, of this class or of a plain optimizer, before or after the model's.

        The model's weights are not written to. A saved master is used where its rounding is the weight, as it is
        everywhere if the model has been loaded, or is yet to be before the next step, from the same checkpoint. Where
        it is not, and for a plain optimizer's state, the weight is the master.
        """
        slots, entry = list(self._all_slots()), state_dict.get(saved.KEY)
        if entry is not None:
            saved.check_entry(entry, slots)
        self.optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != saved.KEY})
        copy_settings(self.optimizer.param_groups, self.param_groups)
        self.sync_from_model()
        if entry is not None:
            self._way.load(entry["way"])
            self._loaded = saved.on_device(entry["values"], slots)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy or a pickle holds: not what schedulers and hooks have put on this object."""
        with torch.no_grad():
            self._settle()
        return {name: self.__dict__[name] for name in _FIELDS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for slot in self._all_slots():
            slot.leave()
        for slots in self._slots:
            self._widen(slots)

    def _all_slots(self) -> Iterator[Slot]:
        for slots in self._slots:
            yield from slots


def _accumulate_in_float32(weight: Tensor) -> None:
    # torch refuses to change the type of a gradient that is there.
    grad, weight.grad = weight.grad, None
    weight.grad_dtype = torch.float32  # type: ignore[attr-defined]
    weight.grad = None if grad is None else grad.float()


_FIELDS = (
    "_grad_room",
    "_loaded",
    "_slots",
    "_value_room",
    "_way",
    "defaults",
    "grad_fp32",
    "kind",
    "optimizer",
    "param_groups",
)
