"""TorchScript in a block: its operations cannot be rounded one by one."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.torch.emulation.operations import are_of
from torch import Tensor, nn

from gradscale.formats import FP16
from gradscale.torch import emulate

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")


def halved(x: Tensor) -> Tensor:
    return torch.relu(x) * 0.3


def branching(x: Tensor) -> Tensor:
    if x.sum() > 0:
        for _ in range(2):
            x = x @ x
    return x


def normalized(x: Tensor) -> Tensor:
    return torch.softmax(x, -1) * 0.3


X = torch.arange(16).view(4, 4) / 3
INDICES = torch.tensor([1, 3])


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


WITH_PRODUCTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a scripted function": (lambda: torch.jit.script(branching), "matmul"),
    "a traced function": (lambda: torch.jit.trace(lambda x: x.addmm(x, x), X), "addmm"),
    "a product in place": (lambda: torch.jit.trace(lambda x: x.clone().addmm_(x, x), X), "addmm_"),
    "a scripted module": (lambda: torch.jit.script(model()), "linear"),
    "a traced module": (lambda: torch.jit.trace(model(), X), "linear"),
    "a scripted part of a module": (lambda: nn.Sequential(torch.jit.script(model())), "linear"),
    "an embedding": (lambda: torch.jit.trace(lambda x: F.embedding(INDICES, x), X), "embedding"),
}


@pytest.mark.parametrize("name", WITH_PRODUCTS)
def test_a_script_with_products_is_refused_with_the_way_out(name: str) -> None:
    make, product = WITH_PRODUCTS[name]
    script = make()
    message = rf"cannot round inside TorchScript.* Received: .* with {product}\. .*PYTORCH_JIT=0.*`with emulate\(.fp32"
    with emulate("e4m3"), pytest.raises(RuntimeError, match=message):
        script(X)
    with emulate("e4m3"), emulate("fp32"):
        found = script(X)
    assert torch.equal(found, script(X))


def test_a_script_without_products_is_rounded_like_one_function() -> None:
    script = torch.jit.script(halved)
    with emulate("fp16"):
        narrow = F.linear(X, X)
        found = script(narrow)
        assert are_of(found, FP16)
        assert are_of(found / 3, FP16)  # it counts as low precision
        assert torch.equal(script(X), halved(X))
    assert torch.equal(found, halved(narrow).half().float())
    with emulate("e4m3"):
        assert torch.equal(script(narrow), halved(narrow))


def test_a_script_with_a_function_of_the_float32_list_is_float32() -> None:
    script = torch.jit.script(normalized)
    with emulate("fp16"):
        assert not are_of(script(F.linear(X, X)), FP16)


def test_gradients_go_through_a_script_and_are_rounded() -> None:
    script, x = torch.jit.script(halved), X.clone().requires_grad_()
    with emulate("fp16"):
        script(F.linear(x, X)).sum().backward()
    assert x.grad is not None
    assert are_of(x.grad, FP16)
    assert x.grad.any()


def test_scripts_run_as_usual_in_other_threads_and_after_the_block() -> None:
    script, found = torch.jit.script(branching), []
    call = torch._C.ScriptFunction.__call__
    expected = script(X)
    with emulate("fp16"):
        thread = threading.Thread(target=lambda: found.append(script(X)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
    assert torch.equal(script(X), expected)
    assert torch._C.ScriptFunction.__call__ == call
