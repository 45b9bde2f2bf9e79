"""Pickled scalers are read; nothing else in a pickle is run, imported or built."""

import io
import os
import pickle
import pickletools
import struct
import sys
import zipfile
from collections import OrderedDict
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peers.hostile_files import zip_of_fields
from tests.peers.real_files import DEEPSPEED, ZERO_SCALER

from gradscale.peers import _unpickle, import_state
from gradscale.peers._unpickle import UNREAD, StandIn, unpickled

SCALER = ZERO_SCALER | {"raise_error_at_min_scale": True, "dynamic": True}


@pytest.fixture
def make_scaler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes objects of classes named as another system's are, so that Python itself can pickle them."""

    def make(module: str, name: str, **attributes: Any) -> Any:
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        scaler_class = type(name, (), {"__module__": module})
        setattr(sys.modules[module], name, scaler_class)
        scaler = scaler_class()
        vars(scaler).update(attributes)
        return scaler

    return make


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_scaler_is_read_from_its_bytes(make_scaler: Any, protocol: int) -> None:
    data = pickle.dumps(make_scaler(DEEPSPEED, "DynamicLossScaler", **SCALER), protocol)
    wanted = import_state("deepspeed", {"loss_scaler": SCALER})
    assert import_state("deepspeed", data) == wanted
    assert import_state("deepspeed", {"loss_scaler": data}) == wanted
    assert import_state("deepspeed", bytearray(data)) == wanted


def test_a_pickled_mapping_is_read_around_its_scaler(make_scaler: Any) -> None:
    scaler = make_scaler(DEEPSPEED, "DynamicLossScaler", **SCALER)
    data = pickle.dumps(OrderedDict(optimizer_state_dict={"loss_scaler": scaler, "zero_stage": 3}))
    assert import_state("deepspeed", data) == import_state("deepspeed", {"loss_scaler": SCALER})


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save_is_read_past_its_tensors(make_scaler: Any, zipped: bool) -> None:
    torch = pytest.importorskip("torch")
    scaler = make_scaler(DEEPSPEED, "DynamicLossScaler", **SCALER, dtype=torch.float16)
    weights = {"flat": [torch.nn.Parameter(torch.ones(3)), torch.zeros(2).half()], "shape": torch.Size([3])}
    stream = io.BytesIO()
    checkpoint = {"optimizer_state_dict": {"loss_scaler": scaler, **weights}}
    torch.save(checkpoint, stream, _use_new_zipfile_serialization=zipped)
    assert import_state("deepspeed", stream.getvalue()) == import_state("deepspeed", {"loss_scaler": SCALER})


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_with_thousands_of_tensors_is_read_past_them(zipped: bool) -> None:
    torch = pytest.importorskip("torch")
    scaler = {"scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 3}
    weights = OrderedDict((f"blocks.{i // 8}.projection{i % 8}.weight", torch.ones(2, 2)) for i in range(2000))
    weights._metadata = OrderedDict(version=1)  # pyright: ignore[reportAttributeAccessIssue] # as `state_dict()` has it
    moments = {i: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2)} for i in range(2000)}
    stream = io.BytesIO()
    checkpoint = {"state_dict": weights, "optimizer_states": [{"state": moments}], "MixedPrecision": scaler}
    torch.save(checkpoint, stream, _use_new_zipfile_serialization=zipped)
    assert import_state("lightning", stream.getvalue()) == import_state("torch", scaler)


def test_a_larger_file_may_hold_more_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(_unpickle, "MOST_WORK", 1000)
    small, large = io.BytesIO(), io.BytesIO()
    for stream, elements in ((small, 2), (large, 4000)):
        torch.save({"loss_scaler": SCALER, **{f"w{i}": torch.ones(elements) for i in range(50)}}, stream)
    assert import_state("deepspeed", large.getvalue()) == import_state("deepspeed", {"loss_scaler": SCALER})
    with pytest.raises(ValueError, match=r"A pickle may hold up to 1000 instructions.*torch.load"):
        import_state("deepspeed", small.getvalue())


def test_tensors_inside_a_pickle_are_skipped(make_scaler: Any) -> None:
    torch = pytest.importorskip("torch")
    scaler = make_scaler(DEEPSPEED, "DynamicLossScaler", **SCALER)
    data = pickle.dumps({"weights": torch.ones(100_000), "loss_scaler": scaler})
    assert import_state("deepspeed", data) == import_state("deepspeed", {"loss_scaler": SCALER})


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_as_python_reads_them(protocol: int) -> None:
    shared = ["a", None, True, -1, 2**40, -(2**70), 0.1, float("inf"), (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]
    value = {
        "shared": shared,
        "again": shared,
        "text": "\u00e9\U0001f600",
        "empty": [{}, [], ""],
        "ordered": OrderedDict(a=1),
    }
    if protocol == 0:
        del value["text"]  # written with an escape sequence, which no key of a scaler has
    assert unpickled(pickle.dumps(value, protocol)) == value


def test_values_of_python_2_are_read() -> None:
    old_style = b"(capex.fp16_utils.loss_scaler\nLossScaler\nq\x01o}q\x02(U\tcur_scaleG@P\x00\x00\x00\x00\x00\x00ub."
    made = unpickled(b"\x80\x02" + old_style)
    assert type(made) is StandIn
    assert made.attributes == {"cur_scale": 64.0}
    pairs = b"ccollections\nOrderedDict\nq\x01]q\x02]q\x03(U\x01aK\x01ea\x85R."
    assert unpickled(b"\x80\x02" + pairs) == {"a": 1}
    text = b"(dp1\nS'scale'\np2\nF64.0\nsS'steps'\nI3\nsS'on'\nI01\ns."
    assert unpickled(text) == {"scale": 64, "steps": 3, "on": True}


def test_keys_that_are_no_texts_are_kept_as_texts() -> None:
    read = unpickled(pickle.dumps({3: "a", (1, 2): "b", None: "c", 2**80: "d", "x": "e", frozenset([1]): "f"}))
    assert list(read.values()) == ["a", "b", "c", "d", "e", "f"]
    assert read["3"] == "a"
    assert all(type(key) is str for key in read)


def test_an_apex_scaler_with_its_overflow_buffer_is_read(make_scaler: Any) -> None:
    torch = pytest.importorskip("torch")
    attributes = {"_loss_scale": 32.0, "dynamic": True, "_max_loss_scale": 64.0, "_min_loss_scale": 2.0}
    attributes |= {"_scale_seq_len": 9, "_unskipped": 4, "_has_overflow": False}
    scaler = make_scaler("apex.amp.scaler", "LossScaler", **attributes, _overflow_buf=torch.zeros(1).int())
    assert import_state("apex", pickle.dumps(scaler)) == import_state("apex", {"loss_scaler": attributes})


def test_tensors_that_were_not_read_are_named_where_a_number_is_needed() -> None:
    torch = pytest.importorskip("torch")
    stream = io.BytesIO()
    torch.save({"grad_scaler": {"scale": torch.ones(1), "growth_tracker": 0, "hysteresis_tracker": 2}}, stream)
    with pytest.raises(ValueError, match=r"must be a number. Received: <not read; load the file with `torch.load"):
        import_state("megatron", stream.getvalue())


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def touch(path: str) -> None:
    """Never runs: a pickle that names it is refused."""
    open(path, "w").close()


HOSTILE = {
    f"{os.system.__module__}.system": Call(os.system, "true"),
    "builtins.eval": Call(eval, "1"),
    "builtins.exec": Call(exec, "1"),
    "builtins.getattr": Call(getattr, (), "count"),
    "builtins.__import__": Call(__import__, "os"),
    f"{open.__module__}.open": Call(open, "/dev/null"),
    "functools.partial": Call(__import__("functools").partial, print),
    "operator.attrgetter": Call(__import__("operator").attrgetter, "x"),
    "subprocess.Popen": Call(__import__("subprocess").Popen, ["true"]),
    "importlib.import_module": Call(__import__("importlib").import_module, "os"),
    "argparse.Namespace": Call(__import__("argparse").Namespace),
    "collections.defaultdict": Call(__import__("collections").defaultdict, list),
    "numpy": np.ones(2),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", ["alone", "in the mapping", "in the scaler", "as constructor argument"])
def test_any_other_global_is_refused_by_name(make_scaler: Any, name: str, place: str) -> None:
    bad = HOSTILE[name]
    value: Any = {
        "alone": bad,
        "in the mapping": {"loss_scaler": 1, "deep": [{"er": (bad,)}]},
        "in the scaler": make_scaler(DEEPSPEED, "LossScaler", cur_scale=bad),
        "as constructor argument": Call(OrderedDict, [("a", bad)]),
    }[place]
    with pytest.raises(ValueError, match=rf"Received: a pickle that uses `{name}"):
        import_state("deepspeed", pickle.dumps(value))


def test_a_refused_call_has_not_run(tmp_path: Any) -> None:
    for trace in (tmp_path / "alone", tmp_path / "nested"):
        data = pickle.dumps({"loss_scaler": pickle.dumps(Call(touch, str(trace)))})
        with pytest.raises(ValueError, match=r"a pickle that uses `.*touch`"):
            import_state("deepspeed", data)
        assert not trace.exists()


def opcodes(*parts: bytes) -> bytes:
    """Returns a hand-made pickle of protocol 2, to say what `pickle.dumps` would not."""
    data = b"\x80\x02" + b"".join(parts) + b"."
    pickletools.dis(data, io.StringIO())
    return data


def global_(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


STAND_IN = global_(DEEPSPEED, "DynamicLossScaler") + b")\x81"


def test_a_setstate_smuggled_in_as_an_attribute_is_not_called() -> None:
    smuggled = b"}" + text("__setstate__") + global_("collections", "OrderedDict") + b"s"
    made = unpickled(opcodes(STAND_IN, smuggled, b"b", b"}", text("cur_scale"), b"K\x01s", b"b"))
    assert type(made) is StandIn
    assert made.attributes == {"cur_scale": 1}


@pytest.mark.parametrize("name", ["__class__", "__dict__", "__reduce__", "__init__", "attributes"])
def test_attributes_with_special_names_are_only_kept(name: str) -> None:
    made = unpickled(opcodes(STAND_IN, b"}", text(name), b"K\x07s", b"b"))
    assert type(made) is StandIn
    assert made.attributes == {name: 7}


def test_a_state_that_is_no_dict_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keeps its attributes in a dict. Received: tuple"):
        unpickled(opcodes(STAND_IN, b"N}" + text("a") + b"K\x01s\x86", b"b"))


def test_constructor_arguments_of_a_stand_in_are_dropped() -> None:
    for call in (b"K\x01\x85\x81", b"K\x01\x85R"):
        made = unpickled(opcodes(global_(DEEPSPEED, "DynamicLossScaler"), call))
        assert type(made) is StandIn
        assert made.attributes == {}


def test_storages_hidden_in_bytes_are_not_unpickled() -> None:
    inner = pickle.dumps(Call(os.system, "true"))
    call = b"B" + struct.pack("<I", len(inner)) + inner + b"\x85R"
    assert unpickled(opcodes(global_("torch.storage", "_load_from_bytes"), call)) is UNREAD


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (DEEPSPEED, "DynamicLossScaler.__init__"),
        (DEEPSPEED, "torch"),
        ("gradscale.peers._unpickle", "StandIn"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("collections", "OrderedDict.fromkeys"),
        ("copyreg", "_reconstructor"),
        ("os", "system"),
    ],
)
def test_neighbours_of_known_names_are_refused(module: str, name: str) -> None:
    with pytest.raises(ValueError, match="a pickle that uses"):
        unpickled(opcodes(global_(module, name)))


def test_nothing_is_imported_by_reading(make_scaler: Any) -> None:
    data = pickle.dumps(make_scaler(DEEPSPEED, "DynamicLossScaler", **SCALER))
    for part in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[part]
    import_state("deepspeed", data)
    assert DEEPSPEED not in sys.modules


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"not a pickle", b"PK\x03\x04 not a zip", b"\x80\x02}q\x00.", opcodes(STAND_IN + b"K\x01a")],
)
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"must be a pickle|A DeepSpeed checkpoint"):
        import_state("deepspeed", data)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_never_do_more_than_raise(data: bytes) -> None:
    try:
        import_state("deepspeed", data)
    except ValueError:
        pass


def test_a_value_that_is_endless_when_spelt_out_is_named_all_the_same() -> None:
    value: Any = 1
    for _ in range(200):
        value = [value, value]
    with pytest.raises(ValueError, match=r"`cur_scale` of .* must be a number. Received: \[\["):
        import_state("deepspeed", pickle.dumps({"loss_scaler": {**SCALER, "cur_scale": value}}))


def zip_of(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}/data.pkl", data)
    return stream.getvalue()


def test_a_zip_file_needs_exactly_one_pickle() -> None:
    for count, data in ((0, zip_of()), (2, zip_of(first=b"N.", second=b"N."))):
        with pytest.raises(ValueError, match=rf"one `data.pkl`. Received: a zip file with {count}"):
            unpickled(data)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_file_with_64_bit_sizes_is_read(monkeypatch: pytest.MonkeyPatch, method: int) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr("archive/data/0", bytes(100))
        archive.writestr("archive/data.pkl", pickle.dumps({"scale": list(range(100))}))
        archive.comment = b"written elsewhere"
    assert b"PK\6\6" in stream.getvalue()
    assert unpickled(stream.getvalue()) == {"scale": list(range(100))}


def test_a_zip_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_unpickle, "LARGEST_MEMBER", 1000)
    with pytest.raises(ValueError, match=r"must not be larger than 1000 bytes. Received: 5000"):
        unpickled(zip_of(archive=bytes(5000)))


def test_a_zip_file_with_a_large_directory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Received: .* \('more than 100000 members, or 8388608 bytes"):
        unpickled(zip_of_fields(150))


def test_half_a_character_does_not_get_into_a_message() -> None:
    with pytest.raises(ValueError, match="a name is not a text"):
        unpickled(b"\x8c\x03\xed\xa0\x80\x8c\x01a\x93.")


def test_a_hostile_pickle_inside_a_zip_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a pickle that uses `.*system`"):
        import_state("deepspeed", zip_of(archive=pickle.dumps(Call(os.system, "true"))))
