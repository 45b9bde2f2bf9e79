"""What an older `Headroom` and `LogMax` saved, whose rule was another, and the errors that refuse it."""

import re

from gradscale.record import OTHER_KEYS

COUNTERS = {"clean_steps": 1, "credits": 1, "applied": 1, "skipped": 1, "consecutive_skips": 1, "stuck": False}
MEMORY = {"scale": 0.015625, "level": 0.5, "ceiling": 16376.0, "recovery_factor": 1.0, "failed_scale": 16384.0}
SETTINGS = {"format": "FP16", "init_scale": 65536.0, "min_scale": 2.0**-24, "max_scale": 2.0**126}

HEADROOM = {
    "policy": {
        **{"schema": 1, "kind": "Headroom", **SETTINGS},
        **{"margin_bits": 2.0, "leak": 0.002, "recovery": 0.0002, "rise_bits": 3.0},
    },
    "state": {"schema": 1, "kind": "HeadroomState", **COUNTERS, **MEMORY, "peak": 0.5},
}

LOG_MAX = {
    "policy": {"schema": 1, "kind": "LogMax", **SETTINGS, "beta1": 0.99, "beta2": 0.999, "deviations": 3.09},
    "state": {
        **{"schema": 1, "kind": "LogMaxState", **COUNTERS, **MEMORY},
        **{"peak": 2.37, "mean": -1.0, "variance": 0.5, "observations": 1.0},
    },
}

GONE = r"\['failed_scale', 'level', 'recovery_factor'\]"
FIX = f".*{re.escape(OTHER_KEYS)}"

REFUSED_POLICY = rf"A saved Headroom has no such key: \['rise_bits'\]{FIX}"
REFUSED_STATE = rf"A saved LogMaxState has no such key: {GONE}{FIX}"
