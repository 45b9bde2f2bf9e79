"""Fine-tuning of low-rank adapters, as in LoRA: all other weights are frozen."""

from benchmarks.study.classification import trained
from benchmarks.study.digits import DigitBatches
from benchmarks.study.one_loss import Batch, OneLossTask
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

RANK, RATE = 4, 3e-3


class Adapted(nn.Module):
    """A frozen layer with an adapter, which is zero at first: so is the gradient of its first half."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class AdapterTask(OneLossTask):
    """Teaches a classifier of upright digits to read transposed ones."""

    def __init__(self, seed: int) -> None:
        base = trained(seed, (64, 64, 64))

        def adapted() -> nn.Module:
            return nn.Sequential(*(Adapted(each) if isinstance(each, nn.Linear) else each for each in base))

        super().__init__(seed, adapted, RATE)
        self._digits = DigitBatches(seed, self.random)

    def batch(self) -> Batch:
        images, labels = self._digits.draw()
        return images.view(-1, 8, 8).transpose(1, 2).flatten(1), labels

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.model(images), labels)
