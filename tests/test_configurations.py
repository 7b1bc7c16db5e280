"""What a plan knows of models: the shipped configurations, and checkpoints with and without weights."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import CHECKPOINTS
from tests.tiny import make_config, write_checkpoint
from wscope_jax import configurations
from wscope_jax.cli import groups
from wscope_jax.errors import CheckpointError
from wscope_jax.layout import EntryLayout

# Name -> parameters, layers, bytes of a token in all layers (bfloat16), positions.
RELEASED = {
    "mixtral-8x7b": (46_702_792_704, 32, 131_072, 32_768),
    "qwen3-30b-a3b": (30_532_122_624, 48, 98_304, 40_960),
    "deepseek-v2-lite": (15_706_484_224, 27, 31_104, 163_840),
    "deepseek-v4-flash": (284_332_230_231, 43, 6_880, 1_048_576),
}


def test_names() -> None:
    assert configurations.names() == tuple(sorted(RELEASED)) == groups.CONFIGURATIONS


@pytest.mark.parametrize("name", RELEASED)
def test_released(name: str) -> None:
    got = configurations.read(name)
    parameters, layers, token_bytes, positions = RELEASED[name]
    assert (got.num_parameters, len(got.streams)) == (parameters, layers)
    assert (got.position_limit, got.dtype) == (positions, "bfloat16")
    grown = sum(
        stream.layout.entry_bytes(2) / stream.layout.tokens_per_entry
        for layer in got.streams
        for stream in layer
        if not stream.kind.startswith("sliding")
    )
    assert grown == token_bytes
    assert got.has_model == (got.model_type != "deepseek_v4")
    assert configurations.read(name, "float32").weight_bytes == 4 * parameters


def test_latent_layout() -> None:
    assert {layer[0].layout for layer in configurations.read("deepseek-v2-lite").streams} == {
        EntryLayout(num_kv_heads=1, key_dim=576, value_dim=512, value_in_key=True)
    }


def test_compressed_layers() -> None:
    got = configurations.read("deepseek-v4-flash")
    kinds = ["+".join(stream.kind for stream in layer) for layer in got.streams]
    assert kinds[:3] == ["sliding(128)", "sliding(128)", "sliding(128)+placed+resident"]
    assert kinds.count("sliding(128)+placed+resident") == 21
    assert kinds.count("sliding(128)+placed") == 20
    rates = {layer[1].layout.tokens_per_entry for layer in got.streams if len(layer) > 1}
    assert rates == {4, 128}
    assert got.weight_bytes == 159_600_000_000  # as published: mostly 4 bits a number


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_checkpoint(family: str, tmp_path: Path) -> None:
    whole = configurations.read(str(CHECKPOINTS[family]))
    shutil.copy(CHECKPOINTS[family] / "config.json", tmp_path)
    alone = configurations.read(str(tmp_path))
    assert alone == whole._replace(name=tmp_path.name)
    assert whole.weight_bytes == 2 * whole.num_parameters
    assert configurations.read(str(tmp_path), "float32").weight_bytes == 4 * whole.num_parameters


def test_the_weights_say_what_config_does_not(tmp_path: Path) -> None:
    tied = write_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    free = write_checkpoint(tmp_path / "free")
    difference = 128 * 32
    got = [configurations.read(str(folder)).num_parameters for folder in (free, tied)]
    assert got[0] - got[1] == difference
    full = write_checkpoint(tmp_path / "full", dtype="float32", torch_dtype=...)
    (full / "config.json").write_text(json.dumps(make_config("qwen3_moe", dtype=...)))
    assert configurations.read(str(full)).dtype == "float32"


def test_a_dtype_that_has_to_be_chosen(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path / "half", dtype="float16"))
    with pytest.raises(CheckpointError, match="choose dtype float32"):
        configurations.read(folder)
    assert configurations.read(folder, "float32").dtype == "float32"


def test_a_checkpoint_of_a_family_without_a_model(tmp_path: Path) -> None:
    config = json.loads(
        (Path(configurations.__file__).parent / "assets/configs/deepseek-v4-flash.json").read_text()
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert configurations.read(str(tmp_path)).num_parameters == 284_332_230_231
    del config["num_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_parameters is missing"):
        configurations.read(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"model_type": ["qwen3_moe"]}, "model_type"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"model_type": "deepseek_v4", "compress_ratios": [1, 4]}, "head_dim|compress|index"),
    ],
    ids=str,
)
def test_refused(change: dict[str, object], about: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**make_config("qwen3_moe"), **change}))
    with pytest.raises(CheckpointError, match=about):
        configurations.read(str(tmp_path))


def test_neither_a_directory_nor_a_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such directory.* or one of deepseek-v2-lite"):
        configurations.read(str(tmp_path / "qwen3-30b"))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        configurations.read(str(tmp_path))


CHECK = """
import sys
from wscope_jax import cli
code = cli.main(sys.argv[1:])
bridge = sys.modules.get("jax._src.xla_bridge")
assert bridge is None or not bridge._backends, bridge._backends
sys.exit(code)
"""


@pytest.mark.parametrize("words", [["plan", "--model"], ["inspect", "--model"], ["doctor"]])
def test_no_backend_is_started(words: list[str]) -> None:
    """On a machine with a GPU a backend would take most of its memory."""
    model = [str(CHECKPOINTS["mixtral"])] if "--model" in words else []
    command = [sys.executable, "-c", CHECK, *words, *model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
