"""The kernel of a rule: bit-exact with numpy in Triton's interpreter, and no instruction that rounds otherwise."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.torch.device.rules import POLICIES

from gradscale import Dynamic, Policy
from gradscale.engine.packed import BLOCK, Packed
from gradscale.kernels.triton.kernel import OLDEST, jitted

pytestmark = pytest.mark.cpu_only("kernels are interpreted, and compiled without a device")

triton: Any = pytest.importorskip("triton", minversion=".".join(map(str, OLDEST)))
compiler: Any = pytest.importorskip("triton.compiler")
backends: Any = pytest.importorskip("triton.backends.compiler")

INEXACT = re.compile(r"\S*(?:\.ftz|\.approx|div\.full|\bfma\.|\bmad\.f)\S*")
SIGNATURE = {"state": "*i32", "numbers": "*fp32", "following": "*i32", "first": "i32", "end": "i32"}
SIGNATURE |= {"length": "i32", "read_clip_norm": "fp32", "ROWS": "constexpr", "BLOCK": "constexpr"}


@pytest.mark.skipif(triton.__version__ < "3.7", reason="the interpreter of Triton 3.6 does not run with numpy 2.4")
def test_kernels_and_their_functions_are_bit_exact_with_numpy() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.torch.device.interpreted"]
    run = subprocess.run(command, env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found.pop("functions") == [0, 0, 0]
    assert found.pop("packets") == [0, 200]
    assert {name: different for name, (different, _) in found.items()} == dict.fromkeys(POLICIES, 0)
    assert all(compared >= 10_000 for _, compared in found.values())


def assembly(kernel: Any, signature: dict[str, str], constants: dict[str, int], arch: int, **options: Any) -> str:
    """Returns the PTX of a kernel for an architecture, compiled without a device."""
    source = compiler.ASTSource(kernel, signature, constants)
    target = backends.GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options={"num_warps": 1, **options}).asm["ptx"]


@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_compiled_kernel_has_no_instruction_that_rounds_otherwise(policy: Policy, arch: int) -> None:
    kernel = jitted(Packed(policy, norm=True, amax=True, clips=True))
    text = assembly(kernel, SIGNATURE, {"ROWS": 1, "BLOCK": BLOCK}, arch, enable_fp_fusion=False)
    assert "div.rn.f32" in text
    assert "sqrt.rn.f32" in text
    assert not INEXACT.findall(text)


WRITE = {"scale": "*fp32", "numbers": "*fp32", "weights": "*fp64", "packet": "*fp64", "amax": "*fp32"}
WRITE |= dict.fromkeys(("first", "end", "last"), "i32")
WRITE |= dict.fromkeys(("elements", "holder", "sends_amax", "bounds"), "fp32") | {"BLOCK": "constexpr"}
READ = {"scale": "*fp32", "packet": "*fp64", "amax": "*fp32", "found": "*fp32", "ranks": "i32"}
READ |= {"same_scale": "fp32", "same_gradients": "fp32"} | dict.fromkeys(("NORM", "PEAK", "SHARE"), "constexpr")


@pytest.mark.parametrize("arch", [75, 80, 90])
def test_the_kernels_of_packets_compile_without_such_instructions(arch: int) -> None:
    from gradscale.kernels.triton import packets

    written = assembly(packets.write, WRITE, {"BLOCK": BLOCK}, arch, enable_fp_fusion=False)
    read = assembly(packets.read, READ, dict.fromkeys(("NORM", "PEAK", "SHARE"), 1), arch, enable_fp_fusion=False)
    assert "div.rn.f32" in written
    assert "sqrt.rn.f64" in read
    assert not INEXACT.findall(written + read)


def test_such_instructions_are_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_kernel.py").write_text(
        "import triton\nimport triton.language as tl\n\n@triton.jit\ndef run(x):\n"
        "    a, b = tl.load(x), tl.load(x + 1)\n    tl.store(x, a / b)\n    tl.store(x + 1, a * b + a)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    kernel = __import__("other_kernel").run
    found = INEXACT.findall(assembly(kernel, {"x": "*fp32"}, {}, 80, enable_fp_fusion=True))
    assert {each.split(".")[0] for each in found} == {"div", "fma"}


def test_the_source_of_a_kernel_is_shown_in_errors() -> None:
    kernel = jitted(Packed(Dynamic()))
    assert kernel.src.startswith("def advance(\n    state, numbers, following, ")


def test_a_rule_that_widens_a_number_has_no_kernel() -> None:
    class Wide(Dynamic):
        def next(self, state: Any, seen: Any, xp: Any) -> Any:
            after = super().next(state, seen, xp)
            return type(after)(after.scale * after.clean_steps)

    with pytest.raises(TypeError, match=r"computes in float32, int32 and bool, unmixed\. Received: mul"):
        jitted(Packed(Wide()))
