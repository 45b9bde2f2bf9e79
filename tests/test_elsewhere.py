"""Names that `gradscale` does not have: the error says which adapter has them."""

import copy
import importlib
import pickle
import subprocess
import sys

import pytest

import gradscale

ADVICE = {
    "LossScaler": r"Use `from gradscale\.torch import LossScaler`, or that of `gradscale\.mxnet` or `gradscale\.numpy`",
    "GradScaler": r"Use `from gradscale\.torch import GradScaler`\.$",
    "Scaler": r"Use `from gradscale\.jax import Scaler`\.$",
    "LossScaleOptimizer": r"Use `from gradscale\.keras import LossScaleOptimizer`\.$",
    "init_trainer": r"Use `from gradscale\.mxnet import init_trainer`\.$",
}


@pytest.mark.parametrize("name", ADVICE)
def test_a_name_of_an_adapter_is_answered_with_its_import(name: str) -> None:
    with pytest.raises(AttributeError, match=ADVICE[name]) as caught:
        getattr(gradscale, name)
    assert caught.value.name == name
    with pytest.raises(ImportError, match=ADVICE[name]):
        exec(f"from gradscale import {name}")
    assert not hasattr(gradscale, name)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'Dynamc'\. Did you mean 'Dynamic'\?$"):
        gradscale.Dynamc  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    with pytest.raises(ImportError, match=r"cannot import name 'Dynamc'"):
        exec("from gradscale import Dynamc")


def test_an_adapter_that_was_not_imported_is_to_be_imported() -> None:
    code = "import gradscale\ntry: gradscale.numpy\nexcept AttributeError as error: print(error)\n"
    code += "from gradscale import numpy\nprint(numpy.LossScaler.__name__, gradscale.numpy is numpy)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = run.stdout.splitlines()
    assert first == "module 'gradscale' has no attribute 'numpy'. Import it first: `import gradscale.numpy`."
    assert second == "LossScaler True"


def test_answering_loads_no_framework() -> None:
    code = "import sys, gradscale\nprint(hasattr(gradscale, 'GradScaler'), 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_reloading_copying_and_star_imports_are_as_without_it() -> None:
    names: dict[str, object] = {}
    exec("from gradscale import *", names)
    assert set(gradscale.__all__) <= names.keys()
    assert importlib.import_module("gradscale") is gradscale
    assert pickle.loads(pickle.dumps(gradscale.Dynamic())) == copy.copy(gradscale.Dynamic())
    assert not hasattr(gradscale, "__wrapped__")
