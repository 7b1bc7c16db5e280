import json
import os
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers")

from tokenizers import decoders, models, pre_tokenizers, processors, trainers  # noqa: E402

from wscope_jax.errors import CheckpointError, UsageError  # noqa: E402
from wscope_jax.tokenizer import IncrementalDecoder, Tokenizer  # noqa: E402

CORPUS = ["the cache is placed when it is written", "größer als 你好世界", "a b c 🙂🙃 naïve"] * 4


def byte_level():
    """As of Qwen3 and DeepSeek: every text is bytes, and merges join them across characters."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    return inner


def byte_fallback():
    """As of Mixtral: characters, bytes for those unknown, a leading space that decoding drops."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz .,", "th", "the", "▁th", "▁the"]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "th"), ("▁th", "e")]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return inner


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=lambda make: make.__name__)
def tokenizer(request):
    return Tokenizer(request.param())


@pytest.fixture
def checkpoint(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def decode_in_pieces(tokenizer, pieces):
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(piece) for piece in pieces), decoder.flush()]


unicode_texts = st.text(max_size=40) | st.text("aé你🙂 \ufffd.▁", max_size=40)


class TestIncrementalDecoder:
    @settings(deadline=None, max_examples=200)
    @given(text=unicode_texts)
    @example(text="\ufffd")
    @example(text="  two  spaces  ")
    def test_texts_come_back_whole(self, tokenizer, text):
        ids = tokenizer.encode(text)
        deltas = decode_in_pieces(tokenizer, [[token] for token in ids])
        assert "".join(deltas) == tokenizer.decode(ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in delta for delta in deltas)

    @settings(deadline=None, max_examples=200)
    @given(data=st.data())
    def test_any_ids_come_back_as_decoded_at_once(self, tokenizer, data):
        """Also bytes that are no characters, special tokens, and ids that no token has."""
        ids = data.draw(st.lists(st.integers(0, tokenizer.num_ids + 3), max_size=40))
        size = data.draw(st.integers(1, 4))
        pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
        assert "".join(decode_in_pieces(tokenizer, pieces)) == tokenizer.decode(ids)

    def test_a_character_appears_with_its_last_byte(self):
        tokenizer = Tokenizer(byte_level())
        ids = tokenizer.encode("x☃!")  # a character that the corpus has not: three tokens
        assert len(ids) == 5
        assert decode_in_pieces(tokenizer, [[token] for token in ids]) == [
            "x",
            "",
            "",
            "☃",
            "!",
            "",
        ]

    def test_an_incomplete_character_comes_out_at_the_end(self):
        tokenizer = Tokenizer(byte_level())
        ids = tokenizer.encode("x☃")[:-1]
        assert decode_in_pieces(tokenizer, [[token] for token in ids]) == ["x", "", "", "\ufffd"]

    def test_the_first_space_is_dropped_once(self):
        tokenizer = Tokenizer(byte_fallback())
        ids = tokenizer.encode("the the")
        deltas = [delta for delta in decode_in_pieces(tokenizer, [[i] for i in ids]) if delta]
        assert deltas == ["the", " ", "the"]

    def test_what_it_remembers_stays_short(self, tokenizer):
        decoder = IncrementalDecoder(tokenizer)
        for token in tokenizer.encode("the cache is placed. " * 200):
            decoder.push([token])
        assert len(decoder._ids) < 16


class TestTokenizer:
    def test_reads_a_checkpoint(self, checkpoint):
        tokenizer = Tokenizer.from_dir(checkpoint, vocab_size=300)
        assert tokenizer.decode(tokenizer.encode("the cache 你")) == "the cache 你"

    def test_begin_token_only_as_the_file_says(self):
        assert Tokenizer(byte_fallback()).encode("a")[0] == 1
        assert 0 not in Tokenizer(byte_level()).encode("a")
        assert Tokenizer(byte_level()).encode("") == []

    @pytest.mark.parametrize("named", ["<bos>", {"content": "<bos>", "lstrip": False}])
    def test_begin_token_that_the_file_beside_it_asks_for(self, checkpoint, named):
        """As in DeepSeek's checkpoints: tokenizer.json leaves it to whoever reads it."""
        config = {"add_bos_token": True, "add_eos_token": False, "bos_token": named}
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer, plain = Tokenizer.from_dir(checkpoint), Tokenizer(byte_level())
        assert tokenizer.encode("a cache") == [0, *plain.encode("a cache")]
        assert tokenizer.encode("") == [0]
        assert tokenizer.encode("<bos>a") == [0, *plain.encode("a")]
        assert tokenizer.encode("a", is_whole=True) == plain.encode("a")
        for absent in ({"add_bos_token": False}, {"add_bos_token": None}, {"bos_token": None}):
            (checkpoint / "tokenizer_config.json").write_text(json.dumps(config | absent))
            assert Tokenizer.from_dir(checkpoint).encode("a") == plain.encode("a")

    @pytest.mark.parametrize("named", ["<no>", {"content": None}, ["<bos>"], 0])
    def test_a_begin_token_that_is_not_there(self, checkpoint, named):
        text = json.dumps({"add_bos_token": True, "bos_token": named})
        (checkpoint / "tokenizer_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"add_bos_token is true, but bos_token is"):
            Tokenizer.from_dir(checkpoint)

    def test_a_begin_token_that_is_there_already(self, tmp_path):
        byte_fallback().save(str(tmp_path / "tokenizer.json"))
        config = {"add_bos_token": True, "bos_token": "<s>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        ids = Tokenizer.from_dir(tmp_path).encode("the")
        assert ids == Tokenizer(byte_fallback()).encode("the")
        assert ids.count(1) == 1

    def test_never_truncates_or_pads(self):
        inner = byte_level()
        inner.enable_truncation(4)
        inner.enable_padding(length=8)
        tokenizer = Tokenizer(inner)
        assert len(tokenizer.encode("x" * 100)) > 10
        assert len(tokenizer.encode("x")) == 1

    def test_special_tokens_give_no_text(self):
        tokenizer = Tokenizer(byte_level())
        assert tokenizer.decode([0, *tokenizer.encode("a"), 1]) == "a"

    def test_half_of_a_surrogate_pair_is_refused(self, tokenizer):
        with pytest.raises(UsageError, match="character 2"):
            tokenizer.encode("ab\udc80")

    def test_none_without_a_file(self, tmp_path):
        assert Tokenizer.from_dir(tmp_path) is None

    def test_ids_beyond_the_model_are_refused(self, checkpoint):
        with pytest.raises(CheckpointError, match="reach 299, but the model has 299"):
            Tokenizer.from_dir(checkpoint, vocab_size=299)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{",
            b"[]",
            b"{}",
            b'{"version": "1.0", "model": {"type": "Nothing"}}',
            b"\xff\xfe\x00",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            b"[" * 100_000,
        ],
    )
    def test_a_corrupt_file_is_one_clear_line(self, tmp_path, content):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
            Tokenizer.from_dir(tmp_path)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500 + len(str(tmp_path))

    def test_a_truncated_file(self, checkpoint):
        path = checkpoint / "tokenizer.json"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match="cannot be read"):
            Tokenizer.from_dir(checkpoint)

    def test_an_inconsistent_file(self, checkpoint):
        path = checkpoint / "tokenizer.json"
        content = json.loads(path.read_text())
        content["model"]["merges"].append(["no such", "token"])
        path.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="cannot be read"):
            Tokenizer.from_dir(checkpoint)

    def test_a_directory_of_that_name(self, tmp_path):
        (tmp_path / "tokenizer.json").mkdir()
        with pytest.raises(CheckpointError, match="not a regular file"):
            Tokenizer.from_dir(tmp_path)

    @pytest.mark.timeout(60)
    def test_a_pipe_of_that_name(self, tmp_path):
        os.mkfifo(tmp_path / "tokenizer.json")
        with pytest.raises(CheckpointError, match="not a regular file"):
            Tokenizer.from_dir(tmp_path)

    def test_a_link_that_leaves_the_folder(self, checkpoint, tmp_path):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "tokenizer.json").symlink_to(checkpoint / "tokenizer.json")
        with pytest.raises(CheckpointError, match="links to a file outside"):
            Tokenizer.from_dir(tmp_path / "other")

    def test_a_pointer_says_how_to_fetch_it(self, tmp_path):
        (tmp_path / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        with pytest.raises(CheckpointError, match="git lfs pull"):
            Tokenizer.from_dir(tmp_path)

    def test_import_stays_light(self):
        code = "import sys, wscope_jax.tokenizer; sys.exit('tokenizers' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)
