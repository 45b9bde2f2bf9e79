"""The environments of `make test-matrix`, and what is tested in each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINS = ROOT / "constraints" / "matrix"


@dataclass(frozen=True)
class Run:
    """One call of pytest, and one line of the table.

    Attributes:
        name: the first cell of the line.
        tests: what is run, in the table's words.
        paths: what is run, for pytest.
        adapters: those that the conformance table runs on.
        environment: further variables of the process.
    """

    name: str
    tests: str
    paths: tuple[str, ...]
    adapters: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One environment.

    Attributes:
        name: what `ROWS=` calls it, and the name of its file of pins.
        python: the minor version of its Python.
        requires: what its pins are resolved from, besides pytest and what gradscale itself needs.
        shows: the modules whose versions are in the table.
        runs: what is tested.
        extra: the extra of gradscale that it is for, if any.
        lowest: the extras whose lower bounds it has, `core` for the dependencies of gradscale itself.
        pins: a file of pins that exists for another purpose as well, if there is one.
    """

    name: str
    python: str
    requires: tuple[str, ...]
    shows: tuple[str, ...]
    runs: tuple[Run, ...]
    extra: str = ""
    lowest: tuple[str, ...] = ()
    pins: Path = Path()

    @property
    def pinned(self) -> Path:
        """The file of its pins."""
        return self.pins if self.pins.name else PINS / f"{self.name}.txt"


CORE = ("engine", "policies", "peers", "replay")
TORCH = (
    "torch",
    "torch-foreach",
    "torch-fused",
    "torch-gradscaler",
    "torch-gradscaler-foreach",
    "torch-gradscaler-fused",
)
JAX = ("jax", "jax-jit", "jax-value-and-grad", "jax-value-and-grad-jit", "jax-scaled", "jax-scaled-jit")
JAX_LIBRARIES = ("flax", "equinox", "dm-haiku", "orbax-checkpoint", "jmp")
COMMAND_LINE = ("typer", "rich")


def _numpy(name: str) -> Run:
    paths = ("tests/numpy", "tests/conformance", "tests/cli", "src/gradscale/numpy")
    return Run(name, "adapter, conformance, command line", paths, ("numpy",))


def _core(name: str) -> Run:
    """The rules themselves. With numpy 2, as their tests run on scalars; with torch, which they are compared with."""
    return Run(name, "engine, policies, other systems, replay", tuple(f"tests/{folder}" for folder in CORE), ("numpy",))


def _torch(name: str) -> Run:
    return Run(name, "adapter, conformance", ("tests/torch", "tests/conformance", "src/gradscale/torch"), TORCH)


def _torch_step(name: str) -> Run:
    """The part that depends on torch's own code the most, where all of it would take too long."""
    paths = ("tests/torch/step", "tests/torch/drop_in", "tests/torch/precision", "tests/conformance")
    return Run(name, "step, drop-in, precision, conformance", paths, TORCH)


def _trainer(name: str) -> Run:
    return Run(name, "integration", (f"tests/integrations/{name.partition('-')[0]}",), ("torch",))


def _jax(name: str) -> Run:
    return Run(name, "adapter, conformance", ("tests/jax", "tests/conformance", "src/gradscale/jax"), JAX)


def _keras(name: str, backend: str) -> Run:
    """The tests on one backend: a process has one."""
    return Run(
        f"{name} on {backend}",
        "adapter, conformance",
        ("tests/keras/backend", "tests/conformance", "src/gradscale/keras"),
        (f"keras-{backend}",),
        {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def _keras_newest(backend: str, python: str, *packages: str) -> Row:
    """An environment with one backend: TensorFlow 2.21 and the CUDA build of torch 2.15 abort in one process."""
    name = f"keras-newest-{backend}"
    shows = ("keras", backend, "numpy")
    run = _keras("keras-newest", backend)
    return Row(name, python, ("keras", *packages, "scikit-learn"), shows, (run,), extra="keras")


ROWS: tuple[Row, ...] = (
    Row(
        "numpy-1.23",
        "3.11",
        ("numpy==1.23.5", "ml_dtypes==0.5.0", "typer==0.16.0", "rich==13.7.0", "packaging==22.0", "click==8.2.1"),
        ("numpy", "ml_dtypes"),
        (_numpy("numpy-1.23"),),
        lowest=("core", "cli"),
    ),
    Row(
        "numpy-1.26",
        "3.12",
        ("numpy==1.26.4", "ml_dtypes", *COMMAND_LINE),
        ("numpy", "ml_dtypes"),
        (_numpy("numpy-1.26"),),
    ),
    Row(
        "numpy-newest",
        "3.14",
        ("numpy", "ml_dtypes", *COMMAND_LINE),
        ("numpy", "ml_dtypes"),
        (_numpy("numpy-newest"),),
    ),
    Row(
        "torch-2.6",
        "3.11",
        ("torch==2.6.0", "numpy==1.26.4", "lightning", "accelerate"),
        ("torch", "numpy"),
        (_torch("torch-2.6"),),
        extra="torch",
        lowest=("torch",),
    ),
    Row(
        "torch-2.10",
        "3.12",
        ("torch==2.10.0",),
        ("torch", "numpy"),
        (_torch_step("torch-2.10"),),
        extra="torch",
    ),
    Row(
        "torch-newest",
        "3.14",
        ("torch", "lightning", "accelerate", *COMMAND_LINE),
        ("torch", "numpy"),
        (_torch("torch-newest"), _core("torch-newest, core")),
        extra="torch",
    ),
    Row(
        "lightning-2.4",
        "3.11",
        ("torch==2.13.0", "lightning==2.4.0"),
        ("lightning", "torch"),
        (_trainer("lightning-2.4"),),
        extra="lightning",
        lowest=("lightning",),
    ),
    Row(
        "accelerate-1.0",
        "3.11",
        ("torch==2.13.0", "accelerate==1.0.0"),
        ("accelerate", "torch"),
        (_trainer("accelerate-1.0"),),
        extra="accelerate",
        lowest=("accelerate",),
    ),
    Row(
        "transformers-5.0",
        "3.11",
        ("torch==2.13.0", "transformers==5.0.0", "accelerate"),
        ("transformers", "accelerate", "torch"),
        (_trainer("transformers-5.0"),),
        extra="transformers",
        lowest=("transformers",),
    ),
    Row(
        "jax-0.7",
        "3.11",
        ("jax==0.7.0", "optax==0.2.5", *JAX_LIBRARIES),
        ("jax", "optax", "flax", "numpy"),
        (_jax("jax-0.7"),),
        extra="jax",
        lowest=("jax",),
    ),
    Row(
        "jax-newest",
        "3.13",
        ("jax", "optax", *JAX_LIBRARIES),
        ("jax", "optax", "flax", "numpy"),
        (_jax("jax-newest"),),
        extra="jax",
    ),
    Row(
        "keras-3.9",
        "3.11",
        # JAX 0.5: `fit` of Keras 3.9 calls `jax.spmd_mode`, which later ones do not have.
        ("keras==3.9.0", "tensorflow-cpu==2.19.1", "jax==0.5.3", "optax==0.2.5", "torch==2.6.0", "scikit-learn"),
        ("keras", "tensorflow", "jax", "torch", "numpy"),
        tuple(_keras("keras-3.9", backend) for backend in ("tensorflow", "jax", "torch")),
        extra="keras",
        lowest=("keras",),
    ),
    _keras_newest("tensorflow", "3.13", "tensorflow-cpu"),
    _keras_newest("jax", "3.14", "jax", "optax"),
    _keras_newest("torch", "3.14", "torch"),
    Row(
        "mxnet-1.9",
        "3.11",
        (),
        ("mxnet", "numpy"),
        (
            Run(
                "mxnet-1.9",
                "adapter, conformance",
                ("tests/mxnet", "tests/conformance", "src/gradscale/mxnet"),
                ("mxnet", "numpy"),
            ),
        ),
        extra="mxnet",
        lowest=("mxnet",),
        pins=ROOT / "constraints" / "mxnet.txt",
    ),
)


def chosen(wanted: Sequence[str], rows: Sequence[Row] = ROWS) -> list[Row]:
    """Returns the rows of these names, all rows for none. A name that no row has raises a `ValueError`."""
    if unknown := sorted(set(wanted) - {row.name for row in rows}):
        raise ValueError(
            f"ROWS must name rows. Received: {', '.join(unknown)}. Known: {', '.join(r.name for r in rows)}."
        )
    return [row for row in rows if not wanted or row.name in wanted]
