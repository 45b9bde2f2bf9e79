"""Policy gradient in BF16 and in FP16: how far training and sampling disagree, and a run that resumes bit-exactly."""

from typing import Any

import torch
from rl_policy import Policy, check_ratios, load_parts, log_probabilities, rewards, rollout, save_parts
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gradscale import NoScaling, preset
from gradscale.torch import LossScaler

SEED, UPDATES = 0, 60
# The first scale is too high on purpose: the first updates overflow, and nothing may move in them.
RULES = {torch.bfloat16: NoScaling(), torch.float16: preset("rl", init_scale=2.0**20)}


class Run:
    """A policy, the 16-bit copy that is sampled, an average of the weights, and a reference to stay close to."""

    def __init__(self, dtype: torch.dtype, seed: int = SEED) -> None:
        torch.manual_seed(seed)
        self.dtype, self.model, self.sampler = dtype, Policy(), Policy().to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)
        self.scaler = LossScaler(self.model, RULES[dtype])
        averages = [AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(decay)) for decay in (0.9, 0.95)]
        self.ema, self.reference = averages
        self.guard = self.scaler.guard(lambda: [each.update_parameters(self.model) for each in averages])
        self.parts: list[Any] = [self.model, self.optimizer, self.scaler, self.ema, self.reference]

    def update(self) -> tuple[Tensor, Tensor]:
        """Samples and learns. Returns the logarithms of the importance ratios, and the mean reward."""
        self.sampler.load_state_dict(self.model.state_dict())
        tokens, sampled = rollout(self.sampler)
        with torch.autocast("cpu", dtype=self.dtype):
            trained = log_probabilities(self.model, tokens)
            with torch.no_grad():
                expected = log_probabilities(self.reference, tokens)
        check_ratios(log_ratios := trained - sampled)
        reward = rewards(tokens)
        gain = log_ratios.exp() * (reward - reward.mean()) / (reward.std() + 1e-6)
        divergence = (expected - trained).expm1() - (expected - trained)  # an estimate of KL(policy, reference)
        self.scaler.backward((0.01 * divergence - gain).mean())
        self.scaler.step(self.optimizer, clip_norm=1.0)
        self.optimizer.zero_grad()
        self.guard.step()  # after a skipped step, average and reference stay where they are
        return log_ratios.detach().double(), reward.mean()

    def train(self, updates: int) -> tuple[Tensor, Tensor]:
        log_ratios, reward = zip(*(self.update() for _ in range(updates)), strict=True)
        return torch.stack(log_ratios), torch.stack(reward)


if __name__ == "__main__":
    print(f"{UPDATES} updates, seed {SEED}\nformat    mean |log ratio|  largest |ratio - 1|  KL(sampler, policy)")
    for dtype in RULES:
        run = Run(dtype)
        halves = [run.train(UPDATES // 2)]
        saved = save_parts(run.parts)
        halves.append(run.train(UPDATES // 2))
        logs, reward = (torch.cat(both) for both in zip(*halves, strict=True))
        measured = logs.abs().mean(), logs.expm1().abs().max(), (logs.expm1() - logs).mean()
        print("{:8}  {:16.1e}  {:19.1e}  {:19.1e}".format(str(dtype).removeprefix("torch."), *measured))
    resumed = Run(torch.float16, seed=SEED + 1)
    load_parts(resumed.parts, saved)
    resumed.train(UPDATES // 2)
    same = all(map(torch.equal, run.model.state_dict().values(), resumed.model.state_dict().values()))
    missed, metrics = 1 - reward, run.scaler.metrics()
    print(f"resumed in the middle: {'the same' if same else 'other'} weights at the end")
    print(
        f"missed reward {missed[0]:.3f} -> {missed[-10:].mean():.3f}, "
        f"skipped {metrics['skipped']:.0f} of {UPDATES} steps, scale {metrics['scale']:g}"
    )
