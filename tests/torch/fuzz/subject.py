"""The subject: the same program with gradscale's `LossScaler`, as a user writes it."""

import copy
import io
import json
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import singledispatchmethod
from unittest import mock

import torch
from tests.torch.fuzz import operations as ops
from tests.torch.fuzz.model import Model, initial, poison
from tests.torch.fuzz.optimizers import make_optimizer, with_masters
from tests.torch.fuzz.outcome import Bad, Outcome, Refused, Result
from tests.torch.fuzz.policies import POLICIES
from tests.torch.fuzz.setup import Setup
from torch import Tensor, nn

from gradscale.torch import LossScaler, StepResult, host


class Subject:
    """Interprets a program with gradscale.

    Attributes:
        model: the model.
        optimizers: in `MasterWeights` where the setup says so.
        scaler: the scaler.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._groups = [list(optimizer.groups) for optimizer in setup.optimizers]
        self._build()

    def _build(self) -> None:
        self.model = Model(self.setup)
        self.optimizers = [
            with_masters(make_optimizer(optimizer, self.model.get_parameter), optimizer)
            for optimizer in self.setup.optimizers
        ]
        self.scaler = self._new_scaler()

    def _new_scaler(self) -> LossScaler:
        scaler = LossScaler(self.model if self.setup.has_model else None, POLICIES[self.setup.policy]())
        if self.setup.protects_buffers:
            scaler.protect_buffers(self.model)
        return scaler

    def run(self, operation: ops.Operation) -> Result:
        """Runs one operation, and returns what gradscale gives."""
        with self._taken_for_a_device(), warnings.catch_warnings():
            # FP16 parameters without masters are warned of; torch warns of a parameter that is listed twice.
            warnings.filterwarnings("ignore", "These parameters are FP16")
            return self._run(operation)

    @contextmanager
    def _taken_for_a_device(self) -> Iterator[None]:
        if not self.setup.on_device:
            yield
            return
        with mock.patch.object(host, "in_host_memory", return_value=False):
            yield

    @singledispatchmethod
    def _run(self, operation: ops.Operation) -> Result:
        raise NotImplementedError(f"The subject does not know {operation}.")

    def _parameter(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    def _chosen(self, indices: Sequence[int]) -> list[torch.optim.Optimizer]:
        return [self.optimizers[index] for index in indices]

    @_run.register
    def _(self, operation: ops.Backward) -> Result:
        loss = self.model(operation.batch)
        try:
            if operation.by_hand:
                self.scaler.scale(loss).backward()
            else:
                self.scaler.backward(loss, retries=operation.retries)
        except RuntimeError as error:
            return Refused(str(error))
        return None

    @_run.register
    def _(self, operation: ops.Grad) -> Result:
        used = [self._parameter(name) for name in operation.batch.parameters]
        return self.scaler.grad(self.model(operation.batch), [each for each in used if each.requires_grad])

    @_run.register
    def _(self, operation: ops.Step) -> Result:
        try:
            result = self.scaler.step(
                *self._chosen(operation.optimizers),
                clip_norm=operation.clip_norm,
                clip_value=operation.clip_value,
                norm=operation.norm,
            )
        except (RuntimeError, TypeError) as error:
            return Refused(str(error))
        return _outcome(result)

    @_run.register
    def _(self, operation: ops.ZeroGrad) -> Result:
        owner = self.model if operation.optimizer is None else self.optimizers[operation.optimizer]
        owner.zero_grad(set_to_none=operation.set_to_none)
        return None

    @_run.register
    def _(self, operation: ops.Unscaled) -> Result:
        entered = False
        try:
            with self.scaler.unscaled(*self._chosen(operation.optimizers)):
                entered = True
                for inner in operation.inside:
                    self._run(inner)
        except (RuntimeError, TypeError) as error:
            if entered:
                raise
            return Refused(str(error))
        return None

    @_run.register
    def _(self, operation: ops.Multiply) -> Result:
        if (grad := self._parameter(operation.parameter).grad) is not None:
            # By parts: a complex product makes NaN of the other part of an inf.
            (torch.view_as_real(grad) if grad.is_complex() else grad).mul_(operation.factor)
        return None

    @_run.register
    def _(self, operation: ops.Clamp) -> Result:
        if (grad := self._coalesced(operation.parameter)) is not None:
            values = grad.values() if grad.is_sparse else grad
            values = torch.view_as_real(values) if values.is_complex() else values
            values.nan_to_num_(0.0, torch.inf, -torch.inf).clamp_(-operation.bound, operation.bound)
        return None

    @_run.register
    def _(self, operation: ops.Poke) -> Result:
        if (grad := self._coalesced(operation.parameter)) is not None:
            poison(grad, operation.index, operation.value)
        return None

    def _coalesced(self, name: str) -> Tensor | None:
        """Returns the gradient of a parameter, in which every row of a sparse one has one entry."""
        parameter = self._parameter(name)
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        return parameter.grad

    @_run.register
    def _(self, operation: ops.ShareGradient) -> Result:
        if (grad := self._parameter(operation.source).grad) is not None:
            self._parameter(operation.target).grad = grad
        return None

    @_run.register
    def _(self, operation: ops.AddGroup) -> Result:
        self._add_group(operation.optimizer, operation.parameters)
        self._groups[operation.optimizer].append(operation.parameters)
        return None

    def _add_group(self, optimizer: int, names: Sequence[str]) -> None:
        self.optimizers[optimizer].add_param_group({"params": list(map(self._parameter, names))})

    @_run.register
    def _(self, operation: ops.Freeze) -> Result:
        self._parameter(operation.parameter).requires_grad_(operation.trained)
        return None

    @_run.register
    def _(self, operation: ops.SetRate) -> Result:
        for group in self.optimizers[operation.optimizer].param_groups:
            group["lr"] = operation.lr
        return None

    @_run.register
    @torch.no_grad()
    def _(self, operation: ops.WriteWeight) -> Result:
        self._parameter(operation.parameter).copy_(initial(self.setup.parameter(operation.parameter)))
        return None

    @_run.register
    def _(self, operation: ops.WriteBuffer) -> Result:
        self.model.total.fill_(operation.value)
        return None

    @_run.register
    def _(self, operation: ops.Evaluate) -> Result:
        with torch.no_grad():
            self.scaler.scale(torch.tensor(operation.loss))
        return None

    @_run.register
    def _(self, operation: ops.Look) -> Result:
        self.scaler.metrics()
        self.scaler.state_dict()
        if self.scaler.last is not None:
            self.scaler.last.poll()
            self.scaler.last.culprits()
        return None

    @_run.register
    def _(self, operation: ops.Closure) -> Result:
        optimizer = self.optimizers[operation.optimizer]
        try:
            closure = self.scaler.closure(lambda: self.model(operation.batch), optimizer)
        except TypeError as error:
            return Refused(str(error))
        optimizer.step(closure)  # type: ignore[arg-type]
        return None if self.scaler.last is None else _outcome(self.scaler.last)

    @_run.register
    def _(self, operation: ops.Save) -> Result:
        try:
            match operation.how:
                case "in place":
                    self.scaler.load_state_dict(self.scaler.state_dict())
                case "fresh scaler":
                    self._load_fresh()
                case "checkpoint":
                    self._load_checkpoint()
                case "deepcopy":
                    everything = copy.deepcopy((self.model, self.optimizers, self.scaler))
                    self.model, self.optimizers, self.scaler = everything
                case "pickle":
                    everything = pickle.loads(pickle.dumps((self.model, self.optimizers, self.scaler)))
                    self.model, self.optimizers, self.scaler = everything
        except RuntimeError as error:
            return Refused(str(error))
        return None

    def _load_fresh(self) -> None:
        saved = json.loads(json.dumps(self.scaler.state_dict()))
        self.scaler = self._new_scaler()
        self.scaler.load_state_dict(saved)

    def _load_checkpoint(self) -> None:
        """Builds everything anew and loads a file with everything in it."""
        file = io.BytesIO()
        parts = [self.model.state_dict(), self.scaler.state_dict(), *(each.state_dict() for each in self.optimizers)]
        torch.save(parts, file)
        file.seek(0)
        model, scaler, *optimizers = torch.load(file, weights_only=True)
        trained = [parameter.requires_grad for parameter in self.model.parameters()]
        self._build()
        for parameter, requires_grad in zip(self.model.parameters(), trained, strict=True):
            parameter.requires_grad_(requires_grad)
        for index, groups in enumerate(self._groups):
            for names in groups[len(self.setup.optimizers[index].groups) :]:
                self._add_group(index, names)
        self.scaler.load_state_dict(scaler)
        for optimizer, saved in zip(self.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(saved)
        # Last: masters must wait for it.
        self.model.load_state_dict(model)


def _outcome(result: StepResult) -> Outcome:
    return Outcome(
        status=result.status(),
        scale=float(result.scale),
        next_scale=float(result.next_scale),
        norm=_number(result.grad_norm),
        amax=_number(result.amax),
        retries=int(result.retries),
        culprits=tuple(Bad(each.name, each.kind, each.count) for each in result.culprits()),
    )


def _number(value: Tensor | None) -> float | None:
    return None if value is None else float(value)
