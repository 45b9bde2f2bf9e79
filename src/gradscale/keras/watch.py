"""`Watch`: a callback that records weights, gradients and outputs of layers at sampled steps of a `fit`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from gradscale.formats import Format
from gradscale.keras.explain import distinct_layers, own_weights, path_in
from gradscale.keras.measure import BACKEND, Gradients, overwrites
from gradscale.keras.optimizer import optimizer_of
from gradscale.keras.step import is_narrow
from gradscale.watching.record import FORMATS, Ranges, WatchRecord
from gradscale.watching.rows import MODEL, Key, Tally, sample_of


class Watch(WatchRecord, keras.callbacks.Callback):
    """Records weights, unscaled gradients and outputs of layers at each `every`-th step of a `fit`.

        watched = Watch(every=100, batch=x[:32])
        model.fit(x, y, callbacks=[watched])
        print(watched.table())

    A sampled step is run without compilation, so that its gradients can be read where the optimizer gets them; steps
    between samples are as they were, and nothing is called in them but a counter. The gradients are those of the batch
    that the step trains on; in a TensorFlow strategy, those of the last replica. Outputs are those of a forward pass in
    inference mode on a batch of yours, since a training step on JAX does not give them away.

    A sampled step synchronizes with the device, and takes as long as any step with `run_eagerly=True`. Compiled code
    may round differently, so that a run that is watched need not end in exactly the same weights.
    """

    async_safe = True
    """Keras may call other callbacks from another thread: this one does nothing at the end of a batch."""

    def __init__(
        self,
        layers: str = "",
        every: int = 100,
        steps: Ranges | None = None,
        *,
        batch: Any = None,
        formats: Sequence[Format | str] = FORMATS,
    ) -> None:
        """Makes a record for one model.

        Args:
            layers: a regular expression; layers in whose path it is found are recorded, with their own weights. By
                default all.
            every: steps from one sample to the next, from step 0 on, over all calls of `fit`. A step is a call of
                Keras's training function: several batches with `steps_per_execution`, of which the gradients of the
                last are kept.
            steps: pairs of the first step and the one after the last; only steps in one of them are sampled.
            batch: inputs of the model, for the outputs of layers. Without it there are none.
            formats: what rows have losses of.

        Raises:
            ValueError: a format is not known, there is none, or `every` or `steps` are not numbers of steps.
        """
        WatchRecord.__init__(self, every, steps, formats)
        keras.callbacks.Callback.__init__(self)
        self._layers = re.compile(layers)
        self._batch = batch

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Checks the model. Keras calls this.

        Raises:
            TypeError: the model was not compiled with gradscale's optimizer.
            ValueError: `layers` is found in the path of no layer.
        """
        del logs
        optimizer_of(self.model, "Watch")
        if not self._chosen(self.model):
            raise ValueError(
                f"`layers` must be found in the path of a layer. Received: layers={self._layers.pattern!r}."
            )

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Prepares the step that comes, if it is sampled. Keras calls this, always in the main thread."""
        del batch, logs
        if self.sampled:
            self._sample_next(self.model, self.step_index)
        self.step_index += 1

    def _sample_next(self, model: Any, step: int) -> None:
        """Records weights and outputs, and makes the training function record gradients when it is called next."""
        outputs = [] if self._batch is None else _counted(_outputs(model, self._batch, self._chosen(model)))
        own = self._weights(model) if model.built else []
        weights = _counted([((path, "weight"), weight.value) for path, weight in own])
        grads: list[tuple[Key, Tally]] = []
        compiled, eager = model.train_function, _uncompiled(model)

        def record(gradients: Gradients, scale: Any) -> None:
            if BACKEND.place(scale) == "<traced>":  # a training step of the user's own may compile this call
                return
            paths = {id(weight): path for path, weight in self._weights(model)}
            present = [
                (paths[id(variable)], grad, variable) for grad, variable in gradients.present if id(variable) in paths
            ]
            if not weights:  # a model that is built by its first step
                weights.extend(_counted([((path, "weight"), variable.value) for path, _, variable in present]))
            arrays: list[tuple[Key, Any]] = [
                ((path, "weight_grad"), BACKEND.values(grad))
                for path, grad, variable in present
                if not overwrites(variable)
            ]
            grads[:] = _counted(arrays, float(np.asarray(keras.ops.convert_to_numpy(scale))))

        def sampled_step(*args: Any) -> Any:
            model.train_function = compiled
            with _recorder(model.optimizer, record):
                outcome = eager(*args)
            self._samples[step] = sample_of([*weights, *outputs, *grads])
            return outcome

        model.train_function = sampled_step

    def _weights(self, model: Any) -> list[tuple[str, Any]]:
        """Returns the weights of the layers that are recorded, with their paths."""
        weights = [weight for layer in self._chosen(model).values() for weight in own_weights(layer)]
        return [(path_in(model, weight), weight) for weight in weights]

    def _chosen(self, model: Any) -> dict[str, Any]:
        """Returns the layers whose paths match, by their paths; the model itself has none."""
        named = {"" if layer is model else path_in(model, layer): layer for layer in distinct_layers(model)}
        return {path: layer for path, layer in named.items() if self._layers.search(path)}


def _counted(named: Sequence[tuple[Key, Any]], scale: float = 1.0) -> list[tuple[Key, Tally]]:
    """Returns what is counted of arrays divided by `scale`, with their names."""
    arrays = [array if scale == 1 else _divided(array, scale) for _, array in named]
    counts = BACKEND.counts(arrays) if arrays else []
    dtypes = [keras.backend.standardize_dtype(array.dtype) for _, array in named]
    return [(key, Tally(*each, dtype, scale)) for (key, _), each, dtype in zip(named, counts, dtypes, strict=True)]


def _divided(array: Any, scale: float) -> Any:
    return keras.ops.divide(keras.ops.cast(array, "float32") if is_narrow(array) else array, scale)


def _outputs(model: Any, batch: Any, chosen: Mapping[str, Any]) -> list[tuple[Key, Any]]:
    """Returns the floating-point outputs of layers in a forward pass on a batch, in the order of the calls."""
    found: list[tuple[Key, Any]] = []
    training = {"training": False} if model._call_has_training_arg else {}
    with BACKEND.no_grad():
        if not model.built:
            model(batch, **training)  # Keras then calls layers once more, without numbers
        try:
            for path, layer in chosen.items():
                _tap(layer, path or MODEL, found)
            model(batch, **training)
        finally:
            for layer in chosen.values():
                layer.__dict__.pop("call", None)
    return found


def _tap(layer: Any, name: str, found: list[tuple[Key, Any]]) -> None:
    """Makes a layer add what it returns to `found`, until its attribute `call` is removed."""
    call = layer.call

    def tapped(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        floating = (each for each in keras.tree.flatten(outputs) if keras.backend.is_float_dtype(each.dtype))
        found.extend(((name, "output"), output) for output in floating)
        return outputs

    # Past `__setattr__`, by which Keras looks for variables, and torch for modules, in what is set.
    object.__setattr__(layer, "call", tapped)


def _uncompiled(model: Any) -> Callable[..., Any]:
    """Returns the training function of a model as it is with `run_eagerly=True`. The model keeps its own."""
    compiled, run_eagerly, jit_compile = model.train_function, model.run_eagerly, model.jit_compile
    try:
        model.run_eagerly, model.jit_compile = True, False
        model.make_train_function(force=True)
        return model.train_function
    finally:
        model.run_eagerly, model.jit_compile = run_eagerly, jit_compile
        model.train_function = compiled


@contextmanager
def _recorder(optimizer: Any, record: Callable[[Gradients, Any], None]) -> Iterator[None]:
    """Has a function called with the gradients of the optimizer inside of the block."""
    optimizer.recorder = record
    try:
        yield
    finally:
        optimizer.recorder = None
