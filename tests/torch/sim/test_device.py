"""The simulated device behaves as a GPU does where tests rely on it: what waits, what is refused, what is late."""

import copy
import io
import math

import pytest
import torch
from tests.torch.sim import host
from torch import Tensor, nn

pytestmark = pytest.mark.simulated_only


def test_tensors_are_made_and_stay_on_the_device() -> None:
    x = torch.ones(2, 3)
    assert x.device == torch.device("sim", 0)
    for made in (x + 1, x.T, x[0], x.sum(), x.half(), torch.zeros_like(x), x.clone(), x.reshape(6)):
        assert made.device == x.device


READS = {
    "item": Tensor.item,
    "bool": lambda x: bool(x > 0),
    "float": float,
    "tolist": Tensor.tolist,
    "cpu": Tensor.cpu,
    "nonzero": Tensor.nonzero,
    "equal": lambda x: torch.equal(x, x),
    "a mask": lambda x: x[x > 0],
    "copy_": lambda x: torch.empty((), device="cpu").copy_(x),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_of_the_host_is_counted_and_can_be_forbidden(read: object) -> None:
    x = torch.ones(())
    with host.waits() as waits:
        read(x)  # type: ignore[operator]
    assert len(waits.reads) >= 1
    assert "test_device.py" in waits.reads[0]
    with pytest.raises(RuntimeError, match="The host waits for the device: "), host.waits(forbid=True):
        read(x)  # type: ignore[operator]


def test_numbers_and_fills_are_no_uploads_and_copies_from_the_host_are() -> None:
    x = torch.ones(3)
    with host.waits() as waits:
        (x * 2.0 + torch.full((), 3.0)).add_(torch.tensor(1.0, device="cpu"))
        torch.zeros(3).add_(torch.ones(3)).fill_(2.0)
        torch.ones(3, device="cpu").to("sim", non_blocking=True)
    assert waits == host.Waits()
    for upload in (lambda: torch.tensor(1.0), lambda: torch.ones(3, device="cpu").to("sim")):
        with host.waits() as waits:
            upload()
        assert (len(waits.reads), len(waits.uploads)) == (0, 1)


def test_tensors_of_the_cpu_are_refused_where_cuda_refuses_them() -> None:
    x, other = torch.ones(3), torch.ones(3, device="cpu")
    for refused in (lambda: x + other, lambda: torch.stack([x, other]), lambda: torch.dot(x, other)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            refused()
    with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
        x.numpy()
    assert (x + torch.ones((), device="cpu")).tolist() == [2.0] * 3
    assert x[torch.tensor([0, 1], device="cpu")].tolist() == [1.0] * 2


def test_a_copy_to_the_host_holds_garbage_until_it_has_arrived() -> None:
    x = torch.ones(3)
    with host.busy(), host.waits() as waits:
        copied, event = x.to("cpu", non_blocking=True), torch.Event(x.device)
        event.record()
        x.fill_(2.0)  # after the copy: it must not see this
        assert all(map(math.isnan, copied.tolist()))
        assert not event.query()
        host.arrive()
        assert event.query()
    assert copied.tolist() == [1.0] * 3
    assert waits == host.Waits()


def test_waiting_for_an_event_is_a_read_unless_the_copy_has_arrived() -> None:
    for waited in (1, 0):
        with host.busy(), host.waits() as waits:
            copied, event = torch.ones(3).to("cpu", non_blocking=True), torch.Event("sim")
            event.record()
            if not waited:
                host.arrive()
            event.synchronize()
        assert copied.tolist() == [1.0] * 3
        assert len(waits.reads) == waited


def test_a_device_that_is_not_busy_has_made_a_copy_when_its_event_is_asked() -> None:
    copied, event = torch.ones(3).to("cpu", non_blocking=True), torch.Event("sim")
    event.record()
    assert math.isnan(copied[0].item())
    assert event.query()
    assert copied.tolist() == [1.0] * 3


def test_gradients_and_fused_optimizers_are_those_of_the_cpu() -> None:
    def trained(device: str) -> list[list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3, device="cpu"), nn.Flatten(), nn.Linear(8, 2, device="cpu")).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            model(torch.linspace(-1, 1, 16, device=device).reshape(1, 1, 4, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.flatten().tolist() for parameter in model.parameters()]

    assert trained("sim") == trained("cpu")


def test_autocast_computes_products_in_half_and_losses_in_float32() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.autocast("sim", dtype=torch.float16):
        y = layer(x)
        loss = nn.functional.mse_loss(y, y.detach())
    assert (y.dtype, loss.dtype, layer(x).dtype) == (torch.float16, torch.float32, torch.float32)
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_copies_and_files_hold_tensors_of_the_device() -> None:
    x, file = torch.arange(3.0), io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    for other in (copy.deepcopy(x), torch.load(file)):
        assert other.device == x.device
        assert other.tolist() == [0.0, 1.0, 2.0]
        assert other.data_ptr() != x.data_ptr()


def test_an_out_may_be_resized_and_may_be_read_as_well() -> None:
    x, out = torch.arange(3.0), torch.empty(0)
    torch.add(x, 1.0, out=out)
    torch.add(x, 1.0, out=x)
    assert out.tolist() == x.tolist() == [1.0, 2.0, 3.0]
