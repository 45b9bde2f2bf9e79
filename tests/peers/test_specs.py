"""Policies by name, for the command line and every adapter."""

from typing import Any

import pytest

from gradscale import BF16, Dynamic, Headroom, NoScaling, Static, preset
from gradscale.peers.specs import as_policy, parse_policy


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("dynamic", Dynamic()),
        ("Dynamic", Dynamic()),
        ("auto", Headroom()),
        ("auto:margin_bits=3", Headroom(margin_bits=3)),
        ("tf_keras", preset("tf-keras")),
        ("PyTorch:growth_interval=7", preset("torch", growth_interval=7)),
        ("dynamic:", Dynamic()),
        ("dynamic:1024", Dynamic(init_scale=1024)),
        ("dynamic:growth_interval=100,init_scale=1024", Dynamic(growth_interval=100, init_scale=1024)),
        (" dynamic : growth_interval = 100 , refill = clean ", Dynamic(growth_interval=100, refill="clean")),
        ("static:2**10", Static(1024)),
        ("static:2^-10", Static(2.0**-10)),
        ("static:scale=1e3", Static(1000)),
        ("none", NoScaling()),
        ("headroom:BF16", Headroom(format=BF16)),
        ("headroom:margin_bits=3", Headroom(margin_bits=3)),
        ("torch", preset("torch")),
        ("torch:growth_interval=7,enabled=true", preset("torch", growth_interval=7)),
        ("torch/ShardedGradScaler", preset("torch", "ShardedGradScaler")),
        ("deepspeed:scale_window=1000", preset("deepspeed", scale_window=1000)),
        ("fairseq:threshold=none", preset("fairseq", threshold=None)),
        ("apex/fp16_utils.DynamicLossScaler", preset("apex", "fp16_utils.DynamicLossScaler")),
    ],
)
def test_a_policy_is_named_with_its_settings(spec: str, policy: Any) -> None:
    assert parse_policy(spec) == policy


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            "nope",
            "`--policy` 'nope': there is no policy of that name. Did you mean 'none'\\? Known: auto, dynamic",
        ),
        ("dynamc", "Did you mean 'dynamic'\\? Known: .* and the rules of other systems: torch, apex, deepspeed"),
        ("DeepSped:scale_window=7", "Did you mean 'deepspeed'\\?"),
        ("cuda", "there is no policy of that name. Known: auto"),
        ("", "`--policy` '': there is no policy of that name. Known: auto"),
        ("static", "`--policy` 'static': scale must be given, as in static:1024"),
        ("static:x", "`scale` must be a number. Received: scale='x'"),
        ("static:0", "`scale` must lie between"),
        ("static:0**-1", "`scale` must be a number"),
        ("static:2**2000", "an exponent must lie between -1022 and 126. Received: 2\\*\\*2000"),
        (
            "dynamic:growht_interval=7",
            "no setting growht_interval. Did you mean 'growth_interval'\\? Known: init",
        ),
        ("dynamic:growth_interval=1.5", "`growth_interval` must be an integer"),
        ("dynamic:growth_interval=7,growth_interval=8", "growth_interval is given twice"),
        ("dynamic:growth_interval=", "settings are given as SETTING=VALUE, separated by commas. Received: 'growth_int"),
        ("dynamic:growth_interval=7,8", "settings are given as SETTING=VALUE, separated by commas. Received: '8'"),
        ("dynamic/fast", "only other systems have rules to choose from. Received: 'fast'"),
        ("none:1", "settings are given as SETTING=VALUE"),
        ("none:scale=1", "there is no setting scale. Known: none"),
        ("headroom:format=float77", "Received: 'float77'. Did you mean 'float'"),
        ("torch/", "a rule must be named after the slash, as in torch/torch.amp.GradScaler. Without it: torch"),
        ("dynamic/", "only other systems have rules to choose from"),
        ("torch/Nope", "`variant` must name a rule of torch. Received: 'Nope'"),
        ("torch:nope=1", "takes that system's own keywords"),
        ("mindspore", "missing a required argument"),
    ],
)
def test_a_policy_that_is_misspelt_is_refused(spec: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_policy(spec)


def test_an_adapter_takes_a_policy_or_its_name() -> None:
    assert as_policy("dynamic:growth_interval=100") == Dynamic(growth_interval=100)
    assert as_policy(policy := Static(4.0)) is policy


@pytest.mark.parametrize(
    ("policy", "kind", "text"),
    [
        (
            "dynamc",
            ValueError,
            r"`policy` must be a policy, such as `Dynamic\(\)`, or name one\. Received: policy='dynamc': "
            r"there is no policy of that name\. Did you mean 'dynamic'\?",
        ),
        ("static:x", ValueError, "Received: policy='static:x': `scale` must be a number"),
        (1024.0, TypeError, r"Received: policy=1024\.0\. .*`Static\(1024\.0\)`.*`Dynamic\(init_scale=1024\.0\)`"),
        (Dynamic, TypeError, r"Received: policy=<class .*Dynamic'>\. .*make one of it, as `Dynamic\(\)`"),
        (None, TypeError, r"Received: policy=None"),
    ],
)
def test_an_adapter_refuses_what_is_neither_and_says_what_to_use(policy: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        as_policy(policy)
