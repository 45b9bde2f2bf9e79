"""A self-test of a device: what loss scaling relies on, each compared with the CPU or with numbers known in advance."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradscale import Dynamic, Headroom, Policy, Static
from gradscale.checkup.host_reads import HostReads
from gradscale.engine.packed import Packed
from gradscale.kernels.triton.operator import advance, number_of, refusal
from gradscale.torch import LossScaler

SIZES = (1, 7, 1000, 100_003)
"""Elements of the gradients that are tested: less than, and not a multiple of, what a kernel takes at once."""

SCALE = 2.0**10

ROUNDED = {
    2049.0: 2048.0,
    2051.0: 2052.0,
    65519.0: 65504.0,
    65520.0: math.inf,
    2.0**-24: 2.0**-24,
    2.0**-25: 0.0,
    3 * 2.0**-25: 2.0**-23,
    1.0 + 2.0**-11: 1.0,
}
"""float32 numbers and what FP16 makes of them: to the nearest, ties to even, subnormals kept."""

FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}


RULES: dict[str, Policy] = {"auto": Headroom(), "dynamic": Dynamic(growth_interval=3, growth_factor=1.1)}


@dataclass(frozen=True, slots=True)
class DeviceFinding:
    """The result of one test.

    Attributes:
        name: what was tested.
        passed: whether it is as it should be; None if it cannot be tested here.
        detail: the numbers, or why not.
    """

    name: str
    passed: bool | None
    detail: str = ""


def check_device(device: str) -> list[DeviceFinding]:
    """Returns the results of all tests on a device. A test that raises has failed, with the error as its detail."""
    tests: dict[str, Callable[[str], tuple[bool | None, str]]] = {
        "FP16 rounding": _rounding,
        "FP16 subnormals": _subnormals,
        "FP16 products": _products,
        "unscaling": _unscaling,
        "inf and NaN are found": _detection,
        "clipping": _clipping,
        **{f"fused {name}": _fused(name) for name in FUSED},
        "host reads of a step": _host_reads,
        **{f"rule on the device, {name}": _rule(policy) for name, policy in RULES.items()},
        "a captured step": _capture,
    }
    return [_tested(name, test, device) for name, test in tests.items()]


def _tested(name: str, test: Callable[[str], tuple[bool | None, str]], device: str) -> DeviceFinding:
    try:
        return DeviceFinding(name, *test(device))
    except Exception as error:  # whatever a device cannot do is a finding
        return DeviceFinding(name, False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _rounding(device: str) -> tuple[bool, str]:
    given = torch.tensor(list(ROUNDED), device=device)
    found = given.half().float().cpu().tolist()
    wrong = [f"{one:g} became {got:g}" for one, got in zip(ROUNDED, found, strict=True) if got != ROUNDED[one]]
    return not wrong, "; ".join(wrong) or f"{len(ROUNDED)} casts exact"


def _subnormals(device: str) -> tuple[bool, str]:
    small = torch.full((16, 16), 2.0**-20, dtype=torch.float16, device=device)
    kept = {
        "times 1": bool((small * 1 == small).all()),
        "in a product": bool((small @ torch.eye(16, dtype=torch.float16, device=device) == small).all()),
        "read back": float(small.cpu()[0, 0]) == 2.0**-20,
    }
    lost = [name for name, is_kept in kept.items() if not is_kept]
    return not lost, f"flushed to zero {', '.join(lost)}" if lost else "kept"


def _products(device: str) -> tuple[bool, str]:
    left, right = _numbers(64 * 64, device).reshape(64, 64), _numbers(64 * 64, device, 1).reshape(64, 64)
    wide = left.cpu() @ right.cpu()
    worst = float(((left.half() @ right.half()).float().cpu() - wide).abs().amax() / wide.abs().amax())
    return worst < 1e-2, f"relative error {worst:.1e}"  # NaN is not below it


def _unscaling(device: str) -> tuple[bool, str]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        parameters = [nn.Parameter(torch.zeros(size, device=device, dtype=dtype)) for size in SIZES]
        scaler, optimizer = _ready(parameters, device, lr=0.0)
        exact = [_numbers(size, "cpu", size) for size in SIZES]
        for parameter, numbers in zip(parameters, exact, strict=True):
            parameter.grad = (numbers * SCALE).to(device, dtype)
        with scaler.unscaled(optimizer):
            pass
        for parameter, numbers in zip(parameters, exact, strict=True):
            if not torch.equal(_grad(parameter).float().cpu(), numbers.to(dtype).float()):
                return False, f"{dtype} gradients of {parameter.numel()} elements differ from the CPU's"
    return True, "bit-exact for float32, float16 and bfloat16"


def _detection(device: str) -> tuple[bool, str]:
    missed: list[str] = []
    for size in SIZES:
        for value in (math.inf, -math.inf, math.nan):
            for position in {0, size // 2, size - 1}:
                parameter = nn.Parameter(torch.ones(size, device=device))
                scaler, optimizer = _ready([parameter], device)
                parameter.grad = torch.ones(size, device=device)
                parameter.grad[position] = value
                if not scaler.step(optimizer).skipped() or not bool((parameter == 1).all()):
                    missed.append(f"{value} at {position} of {size}")
    return not missed, f"not skipped: {', '.join(missed[:3])}" if missed else "all skipped, weights unchanged"


def _clipping(device: str) -> tuple[bool, str]:
    parameter = nn.Parameter(torch.zeros(4, device=device))
    scaler, optimizer = _ready([parameter], device, lr=1.0)
    parameter.grad = torch.tensor([3.0, 0.0, 4.0, 0.0], device=device) * SCALE
    result = scaler.step(optimizer, clip_norm=1.0)
    norm, moved = float(result.grad_norm), -parameter.detach().cpu()
    right = math.isclose(norm, 5.0, rel_tol=1e-5) and torch.allclose(
        moved, torch.tensor([0.6, 0.0, 0.8, 0.0], device="cpu")
    )
    return right, f"norm {norm:.6g}, expected 5"


def _fused(name: str) -> Callable[[str], tuple[bool | None, str]]:
    def test(device: str) -> tuple[bool | None, str]:
        plain = _stepped(name, device, {"foreach": False})
        try:
            folded = _stepped(name, device, {"fused": True})
        except (RuntimeError, TypeError) as error:
            return None, f"torch has none here: {str(error).partition(chr(10))[0][:80]}"
        worst = max(float((one - other).abs().amax()) for one, other in zip(plain, folded, strict=True))
        return worst < 1e-5, f"largest difference to the plain one {worst:.1e}"

    return test


def _stepped(name: str, device: str, kind: dict[str, bool]) -> list[Tensor]:
    """Returns the weights after three clipped steps, of which the second overflows."""
    parameters = [nn.Parameter(_numbers(size, device, size)) for size in SIZES]
    optimizer = FUSED[name](parameters, lr=1e-2, **kind)
    scaler = LossScaler(None, Static(SCALE), device=device)
    for step in range(3):
        _begin(scaler, device)
        for parameter in parameters:
            parameter.grad = _numbers(parameter.numel(), device, step) * SCALE
        if step == 1:
            _grad(parameters[-1])[-1] = math.inf
        scaler.step(optimizer, clip_norm=1.0)
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in parameters]


def _host_reads(device: str) -> tuple[bool | None, str]:
    if torch.device(device).type == "cpu":
        return None, "a CPU is the host"
    fused, plain = _reads_of({"fused": True}, device), _reads_of({"foreach": True}, device)
    return fused == 0 and plain <= 1, f"{fused} with a fused optimizer, {plain} with another"


def _rule(policy: Policy) -> Callable[[str], tuple[bool | None, str]]:
    def test(device: str) -> tuple[bool | None, str]:
        if torch.device(device).type == "cpu":
            return None, "a CPU is the host"
        packed = Packed(policy, norm=True, amax=True, clips=True)
        if refused := refusal(policy, torch.device(device)):
            return None, f"on the host: {refused}"
        start = torch.from_numpy(packed.pack(policy.start()))
        there, here, number = start.to(device), start, number_of(packed)
        numbers = _readings()
        for row in numbers:
            there = advance(there, row.to(device), 2, 4, 1.0, number)
            here = advance(here, row, 2, 4, 1.0, number)
            if not torch.equal(there.cpu(), here):
                return False, f"differs from the host's for norms, magnitudes and loss of {row.tolist()}"
        return True, f"bit-exact with the host's for {len(numbers)} steps"

    return test


def _capture(device: str) -> tuple[bool | None, str]:
    """Captures a step in a CUDA graph, and compares its replays with steps that are run one by one."""
    if torch.device(device).type != "cuda":
        return None, "only CUDA has graphs"
    if refused := refusal(Headroom(), torch.device(device)):
        return None, f"no kernel: {refused}"
    runs = [_Captured(device) for _ in range(2)]
    for run in runs:
        stream: Any = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for number in range(3):
                run.load(number)
                run.step()
        torch.cuda.current_stream(device).wait_stream(stream)
    replayed, plain = runs
    replayed.optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.step()
    for number in range(3, 20):
        replayed.load(number)
        graph.replay()
        plain.load(number)
        plain.step()
    counts = [[run.scaler.metrics()[name] for name in ("scale", "applied", "skipped")] for run in runs]
    same = counts[0] == counts[1] and torch.equal(replayed.weight, plain.weight)
    return same, f"scale, applied and skipped are {counts[0]}, and {counts[1]} one by one"


class _Captured:
    """A weight whose gradient is that of its input, which overflows at every fifth step."""

    def __init__(self, device: str) -> None:
        self.weight = nn.Parameter(torch.ones(1000, device=device))
        self.input = torch.ones(1000, device=device)
        self.optimizer = torch.optim.AdamW([self.weight], lr=1e-2, fused=True)
        self.scaler = LossScaler(None, Headroom(), device=device, capturable=True)

    def load(self, number: int) -> None:
        self.input.copy_(_numbers(1000, "cpu", number) * (1e38 if number % 5 == 4 else 1.0))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.backward((self.weight * self.input).mean())
        self.scaler.step(self.optimizer, clip_norm=1.0)


def _readings() -> Tensor:
    """Returns the norms of two gradients, their largest magnitudes and a loss, of steps from the smallest to inf."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(200, 5, generator=generator, device="cpu")
    numbers *= 2.0 ** torch.linspace(-126, 40, 200, device="cpu").unsqueeze(1)
    numbers[::7, 0] = numbers[::7, 2] = math.inf
    numbers[::50, 4] = math.nan
    return numbers[torch.randperm(200, generator=generator, device="cpu")]


def _reads_of(kind: dict[str, Any], device: str) -> int:
    """Returns how often a step synchronizes, beyond what the optimizer does by itself."""
    parameter = nn.Parameter(torch.ones(1000, device=device))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, **kind)
    scaler = LossScaler(None, Dynamic(), device=device)
    reads: list[int] = []
    for step in (optimizer.step, optimizer.step, lambda: scaler.step(optimizer)):  # the first makes its state
        _begin(scaler, device)
        parameter.grad = torch.ones(1000, device=device)
        with HostReads() as counted:
            step()
        optimizer.zero_grad()
        reads.append(len(counted.host_reads))
    return reads[2] - reads[1]


def _ready(
    parameters: Sequence[nn.Parameter], device: str, lr: float = 0.1
) -> tuple[LossScaler, torch.optim.Optimizer]:
    """Returns a scaler that has scaled a loss, and an optimizer that is not fused."""
    scaler = LossScaler(None, Static(SCALE), device=device, on_stuck="ignore")
    _begin(scaler, device)
    return scaler, torch.optim.SGD(parameters, lr=lr, foreach=False)


def _begin(scaler: LossScaler, device: str) -> None:
    """Scales a loss and differentiates it, so that the gradients that follow belong to a step."""
    leaf = torch.ones((), device=device, requires_grad=True)  # held: torch 2.6 fails if it is gone by the step
    scaler.backward(leaf * 1.0)


def _numbers(count: int, device: str, seed: int = 0) -> Tensor:
    """Returns whole numbers from -8 to 8 divided by 8: exact in every format, also times a power of two."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, (count,), generator=generator) / 8).to(device)


def _grad(parameter: nn.Parameter) -> Any:
    return parameter.grad
