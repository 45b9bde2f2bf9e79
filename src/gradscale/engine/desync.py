"""The error for scales that differ between devices or ranks that share one."""


class ScaleDesync(RuntimeError):
    """Raised when devices or ranks that share a scale have different ones.

    Gradients that different scales made must not be added: no factor unscales their sum.
    """
