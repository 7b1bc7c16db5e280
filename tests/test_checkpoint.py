"""Every fault of a checkpoint directory: the right error, one clear message, nothing executed or opened in vain."""

import builtins
import json
import os
import re
import resource
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.tiny import draw_tensors, make_config, write_checkpoint, write_tensors
from wscope_jax import models
from wscope_jax.checkpoint import Checkpoint, Piece, Place, locate, read_json
from wscope_jax.errors import CheckpointError

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def tiny(tmp_path):
    return write_checkpoint(tmp_path / "tiny")


@pytest.fixture
def sharded(tmp_path):
    return write_checkpoint(tmp_path / "sharded", shards=3)


def fault(directory):
    """The message of the one error that loading raises: one line, and perhaps an indented list."""
    with pytest.raises(CheckpointError) as caught:
        models.load(directory)
    assert caught.value.exit_code == 4
    head, *rest = str(caught.value).split("\n")
    assert len(head) < 600
    assert all(line.startswith("  ") and len(line) < 400 for line in rest)
    return str(caught.value)


def edit_index(directory, edit):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def edit_tensors(directory, edit):
    """Rewrites model.safetensors with other tensors."""
    tensors = draw_tensors(make_config("qwen3_moe"), 0)
    edit(tensors)
    write_tensors(directory, tensors)


@pytest.fixture
def opened(monkeypatch):
    """Names of all files that Python code opens while the test runs."""
    names = []

    def watch(function):
        def wrapper(path, *args, **kwargs):
            names.append(os.path.basename(str(path)))
            return function(path, *args, **kwargs)

        return wrapper

    monkeypatch.setattr(builtins, "open", watch(builtins.open))
    monkeypatch.setattr(os, "open", watch(os.open))
    return names


# --- directories ------------------------------------------------------------------------------------------------------


def test_missing_directory_names_those_beside_it(tiny):
    message = fault(tiny.parent / "tinny")
    assert "no such directory; name the folder that holds config.json" in message
    assert str(tiny) in message


def test_a_file_is_no_directory(tiny):
    assert "not a directory" in fault(tiny / "model.safetensors")


def test_a_path_with_nul_is_refused():
    assert fault("a\0b") == "'a\\x00b': no path; name the folder that holds config.json"


def test_directory_without_config(tiny):
    (tiny / "config.json").unlink()
    assert "no config.json" in fault(tiny)


def test_empty_directory(tmp_path):
    assert "no config.json" in fault(tmp_path)
    with pytest.raises(CheckpointError, match=r"an empty directory; a checkpoint has model\.safe"):
        Checkpoint(tmp_path)


def test_directory_without_weights(tiny):
    (tiny / "model.safetensors").unlink()
    assert "no .safetensors file" in fault(tiny)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("pytorch_model.bin", "PyTorch pickle"),
        ("consolidated.00.pth", "PyTorch pickle"),
        ("model.pt", "PyTorch pickle"),
        ("weights.pkl", "pickle"),
        ("model-q4.gguf", "GGUF"),
    ],
)
def test_other_formats_are_named_and_not_opened(tiny, name, form, opened):
    (tiny / "model.safetensors").rename(tiny / name)
    message = fault(tiny)
    assert f"only weights in another format ('{name}': {form})" in message
    assert "convert it to safetensors" in message
    assert set(opened) == {"config.json"}


def test_safetensors_win_over_other_formats(tiny, opened):
    (tiny / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    models.load(tiny)
    assert "pytorch_model.bin" not in opened


def test_any_safetensors_files_without_an_index(tmp_path):
    directory = write_checkpoint(tmp_path / "model", shards=3)
    (directory / "model.safetensors.index.json").unlink()
    assert models.load(directory).num_layers == 2


def test_a_single_file_wins_over_an_index(sharded, caplog):
    write_tensors(sharded, draw_tensors(make_config("qwen3_moe"), 0))
    models.load(sharded)
    assert "not part of the checkpoint, ignored: model-00001-of-00003" in caplog.text


# --- JSON files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"[1, 2]", "expected a JSON object, found \\[1, 2\\]"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is there twice"),
        (b'{"a": NaN}', "holds NaN"),
        (b'{"a": -Infinity}', "holds -Infinity"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "' + b"x" * (16 << 20) + b'"}', "larger than 16 MiB"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "a Git LFS pointer"),
    ],
)
def test_bad_json(tiny, text, what):
    (tiny / "config.json").write_bytes(text)
    message = fault(tiny)
    assert re.search(what, message)
    assert message.startswith(str(tiny / "config.json"))


def test_bad_generation_config(tiny):
    (tiny / "generation_config.json").write_text("{")
    message = fault(tiny)
    assert str(tiny / "generation_config.json") in message
    assert message.endswith("; correct it there")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_unreadable_file(tiny):
    (tiny / "config.json").chmod(0)
    assert "cannot be read: Permission denied" in fault(tiny)


def test_what_the_system_refuses_says_what_to_look_at(tiny, monkeypatch):
    def refuse(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    message = fault(tiny)
    assert message.endswith(
        "cannot be read: Input/output error; check the file and who may read it"
    )


def test_config_that_is_a_directory(tiny):
    (tiny / "config.json").unlink()
    (tiny / "config.json").mkdir()
    assert "not a regular file" in fault(tiny)


# --- index and shards -------------------------------------------------------------------------------------------------


def test_all_missing_shards_are_listed(sharded):
    for number in (1, 3):
        (sharded / f"model-0000{number}-of-00003.safetensors").unlink()
    message = fault(sharded)
    assert "2 problems (missing files: 2)" in message
    assert "'model-00001-of-00003.safetensors' is missing" in message
    assert "'model-00003-of-00003.safetensors' is missing" in message


def test_one_missing_shard_is_one_line(sharded):
    (sharded / SHARD).unlink()
    assert fault(sharded) == f"{sharded}: '{SHARD}' is missing; fetch the checkpoint again"


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": [1]}])
def test_index_without_a_map(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(json.dumps(content))
    assert "weight_map is" in fault(sharded)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "a\0b.safetensors",
        "x" * 300 + ".safetensors",
        "\ud800.safetensors",
    ],
)
def test_path_tricks_are_refused_before_any_open(sharded, name, opened):
    write_tensors(sharded.parent, {"x": np.zeros(1, np.float32)})
    (sharded.parent / "model.safetensors").rename(sharded.parent / "secret.safetensors")
    edit_index(sharded, lambda weights: weights.update({"model.norm.weight": name}))
    message = fault(sharded)
    assert "is refused" in message
    assert not any(name.endswith(".safetensors") for name in opened)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "", 7, None, ["a"]])
def test_index_that_names_no_safetensors_file(sharded, name):
    edit_index(sharded, lambda weights: weights.update({"model.norm.weight": name}))
    message = fault(sharded)
    assert "weight_map puts 'model.norm.weight' into" in message


def test_a_link_out_of_the_directory_is_refused(sharded, opened):
    target = sharded.parent / "elsewhere.safetensors"
    (sharded / SHARD).rename(target)
    (sharded / SHARD).symlink_to(target)
    assert f"{SHARD}: links to a file outside of {sharded}" in fault(sharded)
    assert "elsewhere.safetensors" not in opened
    assert SHARD not in opened


def test_a_dangling_link_is_a_missing_file(sharded):
    (sharded / SHARD).rename(sharded / "moved")
    (sharded / SHARD).symlink_to(sharded / "gone")
    assert f"'{SHARD}' is missing" in fault(sharded)


def test_a_link_within_the_directory_is_fine(sharded):
    (sharded / SHARD).rename(sharded / "blob")
    (sharded / SHARD).symlink_to("blob")
    models.load(sharded)


def test_the_links_of_a_hub_cache_are_fine(tiny):
    snapshot = tiny.parent / "models--x" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    for path in tiny.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    models.load(snapshot)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tiny.parent / "other.json")
    assert "links to a file outside" in fault(snapshot)


def test_a_pipe_is_refused_and_not_waited_for(sharded):
    (sharded / SHARD).unlink()
    os.mkfifo(sharded / SHARD)
    assert f"{SHARD}: not a regular file" in fault(sharded)


def test_a_tensor_that_is_not_where_the_index_has_it(sharded):
    def move(weights):
        weights["model.norm.weight"] = (SHARD, f"model-00001-{SHARD[12:]}")[
            weights["model.norm.weight"] == SHARD
        ]

    edit_index(sharded, move)
    message = fault(sharded)
    assert "'model.norm.weight' is not in model-0000" in message
    assert "as model.safetensors.index.json has it, it is in model-0000" in message


def test_a_tensor_that_no_shard_has(sharded):
    edit_index(sharded, lambda weights: weights.update({"model.extra": SHARD}))
    assert f"'model.extra' is not in {SHARD}" in fault(sharded)


def test_a_tensor_stored_twice(sharded):
    tensors = draw_tensors(make_config("qwen3_moe"), 0)
    for number in (1, 2):
        save_file(tensors, sharded / f"model-0000{number}-of-00003.safetensors")
    message = fault(sharded)
    assert "tensors stored twice" in message
    assert "is in model-00001-of-00003.safetensors and in model-00002-of-00003" in message
    assert message.count("\n") <= 21


# --- headers ----------------------------------------------------------------------------------------------------------


def header(**tensors):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"abc",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 101 << 20) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 4) + b'{"\xff"',
        header(x=entry()),  # no data
        header(x=entry()) + bytes(7),  # too little
        header(x=entry()) + bytes(12),  # too much
        header(x=entry(), y=entry(offsets=(4, 12))) + bytes(12),  # overlap
        header(x=entry(), y=entry(offsets=(12, 20))) + bytes(20),  # hole
        header(x=entry(shape=(-2,))) + bytes(8),
        header(x=entry(shape=(1 << 62, 1 << 62))) + bytes(8),
        header(x=entry(dtype="F7")) + bytes(8),
        header(x={"dtype": "F32"}) + bytes(8),
        struct.pack("<Q", 118)
        + json.dumps({"x": entry()})[:-1].encode().ljust(59)
        + b","
        + json.dumps({"x": entry()})[1:].encode().rjust(58)
        + bytes(8),  # one key twice
    ],
)
def test_corrupt_headers_name_the_file_and_the_reason(sharded, raw):
    (sharded / SHARD).write_bytes(raw)
    message = fault(sharded)
    assert message.startswith(f"{sharded / SHARD}: ")
    assert message.endswith("; fetch the checkpoint again")


def test_a_truncated_file(tiny):
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert f"{path}: broken or cut off" in fault(tiny)


def test_all_bad_files_are_reported_at_once(sharded):
    (sharded / SHARD).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (sharded / "model-00001-of-00003.safetensors").write_bytes(b"")
    (sharded / "model-00003-of-00003.safetensors").unlink()
    message = fault(sharded)
    assert "3 problems (missing files: 1, unreadable files: 2)" in message
    for what in ("a Git LFS pointer, not the file itself", "an empty file", "is missing"):
        assert what in message


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_missing_unexpected_misshapen_and_mistyped_at_once(tiny):
    def edit(tensors):
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        del tensors["lm_head.weight"]
        tensors["model.layers.7.mlp.gate.weight"] = np.zeros((8, 32), np.float32)
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = np.ascontiguousarray(tensors[name].T)
        tensors["model.norm.weight"] = np.zeros(32, np.int8)

    edit_tensors(tiny, edit)
    message = fault(tiny)
    for what in (
        "missing tensors: 2",
        "unexpected tensors: 1",
        "tensors of a wrong shape: 1",
        "tensors of a wrong dtype: 1",
        "'model.layers.1.mlp.experts.3.up_proj.weight' [24, 32] is missing",
        "'lm_head.weight' [128, 32] is missing",
        "'model.layers.7.mlp.gate.weight' in model.safetensors is not expected",
        "q_proj.weight' in model.safetensors has shape [32, 64], expected [64, 32]",
        "'model.norm.weight' in model.safetensors is I8, expected one of BF16, F16, F32",
    ):
        assert what in message


def test_twenty_problems_are_shown_and_all_are_counted(tiny):
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1000}))
    message = fault(tiny)
    assert "problems (" in message
    assert len(message.split("\n  ")) == 22
    assert re.search(r"\.\.\. and \d{5} more$", message)


def test_a_name_from_the_file_cannot_break_the_line(tiny):
    evil = "x\n\x1b[31mwscope: all is well" + "y" * 500
    edit_tensors(tiny, lambda tensors: tensors.update({evil: np.zeros(1, np.float32)}))
    message = fault(tiny)
    assert "\n" not in message
    assert "\x1b" not in message


def test_nan_weights(tiny):
    def edit(tensors):
        tensors["model.layers.1.input_layernorm.weight"][3] = np.nan

    edit_tensors(tiny, edit)
    assert "'model.layers.1.input_layernorm.weight' holds NaN or infinity" in fault(tiny)


def test_old_rotary_tables_are_ignored(tiny):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(tiny, lambda tensors: tensors.update({name: np.ones(8, np.float32)}))
    models.load(tiny)


def test_a_file_that_shrinks_while_it_is_read(tiny):
    checkpoint = Checkpoint(tiny)
    path = tiny / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)
    places = [
        Place((name,), stored.shape, [[Piece(name, stored.shape)]])
        for name, stored in checkpoint.tensors.items()
    ]
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        list(checkpoint.load(places, np.dtype(np.float32)))


def test_each_number_is_read_once(sharded, monkeypatch):
    ranges = []
    real = os.preadv

    def watch(file, buffers, offset):
        num = real(file, buffers, offset)
        ranges.append((os.readlink(f"/proc/self/fd/{file}"), offset, num))
        return num

    monkeypatch.setattr(os, "preadv", watch)
    models.load(sharded)
    stored = Checkpoint(sharded).tensors.values()
    assert sum(num for _, _, num in ranges) == sum(2 * np.prod(tensor.shape) for tensor in stored)
    last = {}
    for file, offset, num in sorted(ranges):
        assert last.get(file, 0) <= offset
        last[file] = offset + num


def test_places_of_any_stored_dtype(tmp_path):
    """A stored bfloat16, float16 or float32 tensor becomes either dtype; slices and parts go where they belong."""
    rng = np.random.default_rng(0)
    numbers = {
        "BF16": rng.standard_normal((3, 4)).astype(ml_dtypes.bfloat16),
        "F16": rng.standard_normal((3, 4)).astype(np.float16),
        "F32": rng.standard_normal((3, 4)).astype(np.float32),
    }
    save_file(
        numbers | {"part": np.arange(24, dtype=np.float32).reshape(4, 6)},
        tmp_path / "a.safetensors",
    )
    checkpoint = Checkpoint(tmp_path)
    stack = [Piece(name, (3, 4)) for name in numbers]
    rows = [Piece("part", (4, 6), start) for start in (18, 0)]
    places = [Place(("stack",), (3, 3, 4), [stack]), Place(("rows",), (2, 6), [rows])]
    for dtype in (jnp.float32, jnp.bfloat16):
        got = dict(checkpoint.load(places, np.dtype(dtype)))
        expected = np.stack([x.astype(np.float32).astype(dtype) for x in numbers.values()])
        np.testing.assert_array_equal(got["stack",], expected)
        np.testing.assert_array_equal(got["rows",], [np.arange(18, 24), np.arange(6)])
        assert got["stack",].dtype == dtype


def test_loading_takes_no_second_copy(tmp_path):
    """The peak stays near the weights themselves: each parameter is read into the memory that JAX then uses."""
    (jax.device_put(np.zeros(4)) + 1).block_until_ready()
    save_file(
        {f"x{i}": np.zeros((1 << 20, 16), np.float32) for i in range(4)}, tmp_path / "x.safetensors"
    )
    shape = (4, 1 << 20, 16)
    place = Place(("x",), shape, [[Piece(f"x{i}", shape[1:]) for i in range(4)]])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    array = dict(Checkpoint(tmp_path).load([place], np.dtype(np.float32)))["x",]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 1.3 * array.nbytes


# --- small parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0", "é" * 200])
def test_locate_takes_plain_names_only(tmp_path, name):
    with pytest.raises(CheckpointError, match="is refused"):
        locate(tmp_path, name)


def test_read_json_reads(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1, 2.5, null, "é"]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"a": [1, 2.5, None, "é"]}
