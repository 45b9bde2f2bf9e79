"""Policies by name: gradscale's own, and the presets of its peers."""

from collections.abc import Callable, Mapping
from functools import partial

from gradscale import CheckOnly, Dynamic, Headroom, Histogram, LogMax, NoScaling, Static, preset
from gradscale.policies.contract import Policy
from gradscale.policies.scalars import EXACT

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "no scaling": NoScaling,
    "static 1": partial(Static, 1.0),
    "static 1024": partial(Static, 1024.0),
    "static 1/16": partial(Static, 2.0**-4),
    "static 1000": partial(Static, 1000.0),
    "dynamic": partial(Dynamic, init_scale=2.0**10, growth_interval=2, min_scale=2.0**-4),
    "dynamic 65536": partial(Dynamic, growth_interval=3),
    "dynamic low": partial(Dynamic, init_scale=1.0, growth_interval=4, min_scale=2.0**-4),
    "dynamic hysteresis": partial(Dynamic, init_scale=2.0**15, growth_interval=2, hysteresis=2, backoff_factor=0.25),
    "dynamic refill": partial(Dynamic, init_scale=2.0**15, hysteresis=2, refill="clean", max_scale=2.0**16),
    "auto": Headroom,
    "headroom": partial(Headroom, init_scale=2.0**8, min_scale=2.0**-4, margin_bits=1.0),
    "log max": partial(LogMax, min_scale=2.0**-4),
    "histogram": partial(Histogram, init_scale=2.0**12, period=2, min_scale=2.0**-4),
    "torch": partial(preset, "torch", growth_interval=2),
    "apex": partial(preset, "apex"),
    "deepspeed": partial(preset, "deepspeed"),
    "megatron": partial(preset, "megatron", initial_scale=2.0**15, growth_interval=2),
    "fairseq": partial(preset, "fairseq"),
    "keras": partial(preset, "keras"),
    "tf-keras": partial(preset, "tf-keras"),
    "jmp": partial(preset, "jmp", loss_scale=2.0**15),
    "flax": partial(preset, "flax"),
    "mxnet": partial(preset, "mxnet"),
    "paddle": partial(preset, "paddle"),
    "mindspore": partial(preset, "mindspore", "DynamicLossScaleManager", init_loss_scale=2.0**15),
    "openseq2seq": partial(preset, "openseq2seq"),
    "openseq2seq log max": partial(preset, "openseq2seq", "LogMax"),
    "popart": partial(preset, "popart"),
    "chainer": partial(preset, "chainer"),
    "check only": CheckOnly,
}

if not EXACT:
    # With numpy 1 the rule runs on tensors, and torch's logarithm is not that of C.
    del POLICIES["openseq2seq log max"]

INEXACT = ("static 1000", "openseq2seq log max", "chainer")
"""Policies whose scales are not powers of two, so that scaling rounds. Weights agree within a tolerance then."""
