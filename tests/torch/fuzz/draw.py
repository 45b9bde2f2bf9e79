"""Draws programs: what a training loop may do, and sometimes what it should not."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from tests.torch.fuzz import operations as ops
from tests.torch.fuzz.optimizers import FOR_COMPLEX, FOR_HALF, FOR_SPARSE, OPTIMIZERS
from tests.torch.fuzz.policies import INEXACT, POLICIES
from tests.torch.fuzz.setup import OptimizerSetup, Parameter, Setup, names_of
from tests.torch.versions import ADAGRAD_TAKES_GROUPS

from gradscale.torch.compat import has_grad_dtype

INF, NAN = math.inf, math.nan

ONLY_CLOSURE = ("lbfgs",)
NO_CLOSURE = ("user's own",)
FOR_INEXACT = ("sgd", "sgd foreach", "sgd fused", "sgd momentum", "user's own")
"""Optimizers for scales that are no powers of two: others turn a rounding error near 0 into an update of full size."""


def draw(seed: int) -> ops.Program:
    """Returns the program of a seed, the same on every machine."""
    rng = Random(seed)
    setup = _setup(rng)
    return ops.Program(setup, tuple(_Loop(rng, setup).operations()))


# The setup.


def _setup(rng: Random) -> Setup:
    policy = rng.choice(list(POLICIES))
    exact = policy not in INEXACT
    masters = exact and rng.random() < 0.35
    parameters = [Parameter("w0", exponent=rng.randint(-4, 2), through_half=exact and rng.random() < 0.4)]
    parameters += [_parameter(rng, f"w{index}", exact, masters) for index in range(1, rng.randint(2, 5))]
    return Setup(
        parameters=tuple(parameters),
        optimizers=_optimizers(rng, parameters, exact=exact, masters=masters),
        policy=policy,
        tied="w0" if rng.random() < 0.15 else None,
        has_model=rng.random() < 0.85,
        on_device=rng.random() < 0.35,
        protects_buffers=rng.random() < 0.3,
        loss_dtype=rng.choice(["float32", "float32", "bfloat16", "float64"]) if exact else "float32",  # type: ignore[arg-type]
    )


def _parameter(rng: Random, name: str, exact: bool, masters: bool) -> Parameter:
    kind = rng.choice(
        ["dense", "dense", "double", "complex", "sparse", "empty", "frozen"]
        + exact * ["half", "through half", "through half"]
        + masters * ["half"] * 6
    )
    plain = Parameter(name, size=rng.randint(1, 4), exponent=rng.randint(-6, 3))
    match kind:
        case "double":
            return replace(plain, dtype="float64")
        case "complex":
            return replace(plain, dtype=rng.choice(["complex64", "complex128"]))
        case "sparse":
            return replace(plain, dtype=rng.choice(["float32", "float64"]), sparse=True, through_half=exact)
        case "empty":
            return replace(plain, size=0)
        case "frozen":
            return replace(plain, trained=False)
        case "half":
            # Gradients that FP16 holds only while they are scaled: masters must not lose them.
            exponent = rng.choice([-24, -20, -2, 0]) if masters else rng.randint(-4, 2)
            return replace(plain, dtype=rng.choice(["float16", "float16", "bfloat16"]), exponent=exponent)
        case "through half":
            return replace(plain, through_half=True)
        case _:
            return plain


def _optimizers(rng: Random, parameters: Sequence[Parameter], exact: bool, masters: bool) -> tuple[OptimizerSetup, ...]:
    later = [each for each in parameters[1:] if rng.random() < 0.15]
    held = [each for each in parameters if each not in later]
    sparse = [each for each in held if each.sparse]
    if sparse and rng.random() < 0.4:
        parts = [[each for each in held if not each.sparse], sparse]
    elif len(held) == 1 or rng.random() < 0.6:
        parts = [held]
    else:
        cut = rng.randint(1, len(held) - 1)
        parts = [held[:cut], held[cut:]]
        if rng.random() < 0.25:
            parts[1] = [*parts[1], held[0]]  # a parameter that both optimizers hold
    return tuple(_optimizer(rng, part, later, exact=exact, masters=masters) for part in parts)


def _optimizer(
    rng: Random, held: Sequence[Parameter], later: Sequence[Parameter], *, exact: bool, masters: bool
) -> OptimizerSetup:
    names = [parameter.name for parameter in held]
    kinds = [kind for kind in OPTIMIZERS if _fits(kind, held, later, exact=exact, masters=masters)]
    kind = "sparse adam" if "sparse adam" in kinds and rng.random() < 0.5 else rng.choice(kinds)
    cut = len(names) if kind == "lbfgs" else rng.randint(1, len(names))  # LBFGS takes one group
    groups = tuple(tuple(part) for part in (names[:cut], names[cut:]) if part)
    if not masters or kind in ("lbfgs", "sparse adam"):
        return OptimizerSetup(kind, groups)
    storage = rng.choice(["fp32", "remainder", "kahan", "stochastic"])
    return OptimizerSetup(kind, groups, storage, grad_fp32=rng.random() < 0.5 and has_grad_dtype())  # type: ignore[arg-type]


def _fits(kind: str, held: Sequence[Parameter], later: Sequence[Parameter], *, exact: bool, masters: bool) -> bool:
    """Returns whether torch's optimizer takes such parameters: those that it holds, and those that are added later."""
    if kind == "sparse adam":
        return all(parameter.sparse for parameter in held) and exact  # no group is added to it
    parameters = [*held, *later]
    sparse = [parameter.sparse for parameter in parameters]
    if kind == "lbfgs":
        return all(each.dtype == "float32" and not each.sparse and each.size for each in parameters) and exact
    return (
        (not any(sparse) or kind in FOR_SPARSE)
        and (not any(each.is_complex for each in parameters) or kind in FOR_COMPLEX)
        and (masters or not any(each.is_half for each in parameters) or kind in FOR_HALF)
        and (exact or kind in FOR_INEXACT)
        and (ADAGRAD_TAKES_GROUPS or not kind.startswith("adagrad"))
    )


# The operations.


class _Loop:
    """Draws the operations of one training loop."""

    def __init__(self, rng: Random, setup: Setup) -> None:
        self._rng = rng
        self._setup = setup
        every = range(len(setup.optimizers))
        self._stepped = tuple(index for index in every if setup.optimizers[index].kind not in ONLY_CLOSURE)
        self._closures = [index for index in every if setup.optimizers[index].kind not in NO_CLOSURE]
        held = names_of([group for optimizer in setup.optimizers for group in optimizer.groups])
        self._later = [parameter.name for parameter in setup.parameters if parameter.name not in held]
        self._scales = bool(POLICIES[setup.policy]().needs)
        # torch's LBFGS cannot be copied: it loses its parameters.
        copies = not any(optimizer.kind == "lbfgs" for optimizer in setup.optimizers)
        self._ways_to_save: list[ops.How] = ["in place", "fresh scaler", "checkpoint"]
        if copies:
            self._ways_to_save.extend(("deepcopy", "pickle"))

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def operations(self) -> Iterator[ops.Operation]:
        """Yields the operations."""
        long = self._chance(0.04)
        for _ in range(self._rng.randint(18, 36) if long else self._rng.randint(2, 6)):
            yield from self._between_steps()
            if self._closures and (not self._stepped or self._chance(0.1)):
                yield ops.Closure(self._rng.choice(self._closures), self._batch(0.2))
                yield from self._clear()
            else:
                yield from self._iteration()

    def _between_steps(self) -> Iterator[ops.Operation]:
        rng, names = self._rng, [parameter.name for parameter in self._setup.parameters]
        if self._chance(0.12):
            yield ops.Save(rng.choice(self._ways_to_save))
        if self._chance(0.05):
            yield ops.SetRate(rng.randrange(len(self._setup.optimizers)), rng.choice([0.25, 0.0625]))
        if self._chance(0.05):
            yield ops.WriteWeight(rng.choice(names))
        if self._chance(0.08):
            yield ops.WriteBuffer(float(rng.randint(-9, 9)))
        if len(names) > 1 and self._chance(0.08):
            yield ops.Freeze(rng.choice(names[1:]), trained=self._chance(0.5))
        if self._chance(0.06):
            yield ops.Look()
        if self._chance(0.06):
            yield from self._add_group()
        if self._chance(0.06):
            yield ops.Evaluate(rng.choice([1.0, INF, NAN]))

    def _iteration(self) -> Iterator[ops.Operation]:
        """Yields the passes of one step, and the step."""
        rng = self._rng
        if self._chance(0.08):  # an abandoned batch
            yield self._backward(0.7)
            yield ops.ZeroGrad(None, set_to_none=self._chance(0.5))
        if self._chance(0.06):
            yield ops.Grad(self._batch(0.3))
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            yield self._backward(0.15)
        if self._chance(0.03):
            yield ops.Save("in place")
            yield ops.ZeroGrad(None, set_to_none=self._chance(0.5))
            yield self._backward(0.0)
        targets = self._stepped if self._chance(0.7) else (rng.choice(self._stepped),)
        shares = False
        if self._chance(0.05):
            yield ops.Poke(rng.choice(self._names()), rng.randrange(3), rng.choice([INF, -INF, NAN]))
        if self._chance(0.05) and (pair := self._alike()):
            yield ops.ShareGradient(*pair)
            shares = True
        if self._chance(0.15):
            yield ops.Unscaled(targets, tuple(self._edits()))
        elif self._chance(0.04):
            yield from self._add_group()
        yield self._step(targets)
        if self._chance(0.03):
            yield self._step(targets)
        if self._chance(0.05):
            yield ops.Look()
        if shares:
            yield ops.ZeroGrad(None)
        elif not self._chance(0.05):
            yield from self._clear()

    def _edits(self) -> Iterator[ops.Operation]:
        for _ in range(self._rng.randint(0, 2)):
            name = self._rng.choice(self._names())
            match self._rng.randrange(5):
                case 0 | 1:
                    yield ops.Multiply(name, self._rng.choice([0.5, 2.0, 0.0]))
                case 2:
                    yield ops.Clamp(name, 2.0)
                case 3:
                    yield ops.Poke(name, self._rng.randrange(3), self._rng.choice([INF, NAN]))
                case _:
                    yield from self._add_group()

    def _add_group(self) -> Iterator[ops.Operation]:
        optimizers = [index for index in self._stepped if self._setup.optimizers[index].kind != "sparse adam"]
        if self._later and optimizers:
            yield ops.AddGroup(self._rng.choice(optimizers), (self._later.pop(),))

    def _step(self, targets: tuple[int, ...]) -> ops.Step:
        rng = self._rng
        clip_norm = rng.choice([None] * 6 + [2.0**20, 2.0**20, 0.5, 4.0])
        return ops.Step(targets, clip_norm, 2.0 if self._chance(0.08) else None, norm=self._chance(0.2))

    def _clear(self) -> Iterator[ops.Operation]:
        set_to_none = self._chance(0.6)
        if self._chance(0.6):
            yield ops.ZeroGrad(None, set_to_none)
        else:
            for index in range(len(self._setup.optimizers)):
                yield ops.ZeroGrad(index, set_to_none)

    def _backward(self, fault: float) -> ops.Backward:
        retries = self._rng.randint(1, 4) if self._setup.has_model and self._chance(0.2) else 0
        return ops.Backward(self._batch(fault), retries, by_hand=not retries and self._chance(0.25))

    def _names(self) -> list[str]:
        return [parameter.name for parameter in self._setup.parameters]

    def _alike(self) -> tuple[str, str] | None:
        """Returns two parameters that can have one gradient."""
        first = [each for each in self._setup.parameters if not (each.sparse or each.is_half)]
        pairs = [
            (one.name, other.name)
            for one in first
            for other in first
            if one is not other and (one.dtype, one.size) == (other.dtype, other.size)
        ]
        return self._rng.choice(pairs) if pairs else None

    def _batch(self, fault: float) -> ops.Batch:
        """Returns a batch that uses `w0` and most others, in which something goes wrong with probability `fault`."""
        rng = self._rng
        used = tuple(name for name in self._names() if name == "w0" or self._chance(0.85))
        batch = ops.Batch(rng.randrange(1000), used, rng.choice([1.0, 1.0, 0.5]), seen=float(rng.randint(-3, 3)))
        return self._with_fault(batch) if self._chance(fault) else batch

    def _with_fault(self, batch: ops.Batch) -> ops.Batch:
        rng = self._rng
        match rng.randrange(10):
            case 0 | 1:
                return replace(batch, loss_offset=rng.choice([INF, -INF, NAN]), seen=NAN)
            case 2:
                return replace(batch, loss_factor=rng.choice([INF, NAN]), seen=INF)
            case 3 | 4 if self._may_be_huge():
                return replace(batch, faults=(self._huge(batch),))
            case _:
                bad = ops.Fault(rng.choice(batch.parameters), rng.randrange(3), rng.choice([INF, -INF, NAN]))
                return replace(batch, faults=(bad,))

    def _may_be_huge(self) -> bool:
        # On a device a finite check may read norms, whose squares overflow above 1.8e19: documented, and either status
        # is right. Rounding is not exact there for other scales than powers of two.
        return not self._setup.on_device and self._setup.policy not in INEXACT

    def _huge(self, batch: ops.Batch) -> ops.Fault:
        name = self._rng.choice(batch.parameters)
        parameter = self._setup.parameter(name)
        values = [60000.0] if parameter.is_half else [2.0**80, 2.0**126]
        if parameter.dtype in ("float64", "complex128"):
            values = [2.0**80, 2.0**200]
        return ops.Fault(name, self._rng.randrange(3), self._rng.choice(values))
