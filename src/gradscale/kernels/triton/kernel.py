"""The kernel of a rule: printed from its trace, compiled by Triton, and launched once per step."""

import linecache
from typing import Any

import numpy as np
from torch import Tensor

from gradscale.engine.packed import BLOCK, Packed
from gradscale.policies.compiled import traced
from gradscale.policies.triton_text import TritonSource

OLDEST = (3, 6)
"""The first version of Triton whose `div_rn` is exact: before, it flushes subnormal numbers to 0."""


# Without fused multiply-adds, which round once where the host rounds twice.
OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
"""How kernels are compiled."""


def kernel_text(packed: Packed) -> str:
    """Returns the source of a kernel that advances the rule by a step."""
    source = TritonSource()
    texts = source.texts(traced(packed.step, packed.operands))
    width = len(packed.kinds)
    inputs = [name if name == "amax_ratio" else f"state_{name}" for name in packed.kinds][: packed.at("found_inf")]
    kinds = list(packed.kinds.values())
    read = [f"{name} = tl.load(state + row * {width} + {place})" for place, name in enumerate(inputs)]
    read = [line + _from_bits(kind) for line, kind in zip(read, kinds, strict=False)]
    read += ["read_amax = largest(numbers, row, length, first, end, BLOCK)"] if packed.amax else []
    read += ["read_norm = norm_of(numbers, row, length, first, BLOCK)"] if packed.norm else []
    last = "length - 1" if packed.shares else "length"
    read += [f"read_upper_share = tl.load(numbers + row * length + {last})"] if packed.shares else []
    read += [f"read_loss = largest(numbers, row, length, end, {last}, BLOCK)"]
    written = [
        f"tl.store(following + row * {width} + {place}, ({text}){_to_bits(kind)})"
        for place, (text, kind) in enumerate(zip(texts, kinds, strict=True))
    ]
    # A barrier, as `following` may be `state`: no thread may write what another has yet to read.
    body = [*read, *source.lines, "tl.debug_barrier()", *written]
    return HEAD + "".join(f"    {line}\n" for line in body)


HEAD = """\
def advance(
    state, numbers, following, first, end, length, read_clip_norm, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.arange(0, ROWS)
"""


def _from_bits(kind: type) -> str:
    return {np.float32: ".to(tl.float32, bitcast=True)", np.bool_: " != 0"}.get(kind, "")


def _to_bits(kind: type) -> str:
    return {np.float32: ".to(tl.int32, bitcast=True)", np.bool_: ".to(tl.int32)"}.get(kind, "")


def jitted(packed: Packed) -> Any:
    """Returns the kernel as a function of Triton, which compiles it when it is first launched.

    Raises:
        ImportError: Triton is not installed, or too old.
        TypeError: the rule computes with other types than a kernel does.
    """
    import triton

    jit: Any = triton.jit  # whose types do not know that it takes options beside a function
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(f"Kernels of a rule need Triton {oldest} or newer. Found: Triton {triton.__version__}.")
    from gradscale.kernels.triton import functions

    text = kernel_text(packed)
    # Triton reads the source of a function from its file.
    file = f"<kernel of {packed!r}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names = dict(vars(functions))
    exec(compile(text, file, "exec"), names)
    return jit(names["advance"], do_not_specialize=["first", "end", "length"])


def launch(
    kernel: Any,
    state: Tensor,
    numbers: Tensor,
    following: Tensor,
    first: int,
    end: int,
    clip_norm: float,
    rows: int = 1,
) -> None:
    """Queues a step of a rule, or of many: each of the `rows` of `state` and of `numbers` is one.

    `following` gets the states after it, and may be `state`. All others are as in `operator.advance`.
    """
    length = numbers.shape[-1]
    kernel[(1,)](state, numbers, following, first, end, length, clip_norm, ROWS=rows, BLOCK=BLOCK, **OPTIONS)
