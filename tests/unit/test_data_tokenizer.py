"""The byte tokenizer: exact, stable, reloadable, and as fast as a copy."""

import json

import numpy as np
import pytest
from data_tokenizers import save_word_tokenizer
from transformers import AutoTokenizer, LlamaConfig

from automodel.config import ConfigError, TrainConfig
from automodel.data import BYTE_VOCABULARY_SIZE, byte_tokenizer, load_tokenizer, names_byte_tokenizer
from automodel.data.checks import check_data
from automodel.data.documents import stdlib_files
from automodel.data.tokenizer import encode_document, is_byte_tokenizer

TEXTS = [
    "",
    " leading, trailing and  double  spaces ",
    "tabs\tand\r\nline ends\n\n",
    "emoji 👩‍👩‍👧 and 中文日本語한국어 and Ünïcödé",
    "combining e\u0301 stays two code points; nul \x00 and del \x7f too",
    "a text may spell <|eos|> and <|pad|> and </s>",
    "".join(chr(code) for code in range(0x300)),
]


def slow_ids(tokenizer, text: str) -> list[int]:
    """What the tokenizer itself says, without the numpy path."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_vocabulary_is_256_bytes_and_three_control_tokens():
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == BYTE_VOCABULARY_SIZE == 259
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_is_exact_and_ids_are_the_bytes(text):
    tokenizer = byte_tokenizer()
    ids = slow_ids(tokenizer, text)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_fast_path_equals_the_tokenizer(text):
    tokenizer = byte_tokenizer()
    assert encode_document(tokenizer, text).tolist() == slow_ids(tokenizer, text)


def test_fast_path_equals_the_tokenizer_on_real_files():
    tokenizer = byte_tokenizer()
    for path in stdlib_files()[::60]:
        data = path.read_bytes()
        assert encode_document(tokenizer, data).tolist() == slow_ids(tokenizer, data.decode("utf-8"))


def test_byte_tokenizer_takes_any_bytes():
    assert encode_document(byte_tokenizer(), b"\xff\xfe\x80").tolist() == [255, 254, 128]


def test_saved_tokenizer_reloads_as_the_same_also_beside_a_model_config(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    LlamaConfig(vocab_size=264).save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert is_byte_tokenizer(reloaded)
    assert (reloaded.pad_token_id, reloaded.bos_token_id, reloaded.eos_token_id) == (256, 257, 258)
    for text in TEXTS:
        assert slow_ids(reloaded, text) == list(text.encode("utf-8"))
        assert reloaded.decode(slow_ids(reloaded, text)) == text


def test_last_call_with_padding_does_not_hide_the_byte_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer(["a", "long"], padding=True, truncation=True, max_length=3)
    assert is_byte_tokenizer(tokenizer)


def test_another_tokenizer_encodes_as_itself_and_cannot_be_made_to_end_a_document(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_word_tokenizer(tmp_path))
    assert not is_byte_tokenizer(tokenizer)
    assert encode_document(tokenizer, "the cat sat").tolist() == [1, 2, 3]
    assert encode_document(tokenizer, "the cat").dtype == np.uint16
    assert tokenizer("the [EOS]")["input_ids"] == [1, tokenizer.eos_token_id]
    assert encode_document(tokenizer, "the [EOS]").tolist() == [1, tokenizer.unk_token_id]


def test_tokenizer_of_a_setting_of_the_model_folder_or_bytes(tmp_path):
    config = TrainConfig()
    assert is_byte_tokenizer(load_tokenizer(config))
    assert names_byte_tokenizer(config)

    bare = tmp_path / "bare"
    LlamaConfig(vocab_size=264).save_pretrained(bare)
    config.model.pretrained_model_name_or_path = str(bare)
    assert is_byte_tokenizer(load_tokenizer(config))
    assert names_byte_tokenizer(config)

    words = save_word_tokenizer(tmp_path / "words")
    config.model.pretrained_model_name_or_path = str(words)
    assert load_tokenizer(config).convert_tokens_to_ids("cat") == 2
    assert not names_byte_tokenizer(config)

    byte_tokenizer().save_pretrained(tmp_path / "bytes")
    config.data.tokenizer = str(tmp_path / "bytes")
    assert is_byte_tokenizer(load_tokenizer(config))
    assert names_byte_tokenizer(config)


def test_damaged_tokenizer_is_refused_by_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": "nonsense"}))
    config = TrainConfig()
    config.data.tokenizer = str(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        load_tokenizer(config)
    assert (refusal.value.key, refusal.value.value) == ("data.tokenizer", str(tmp_path))


def test_tokenizer_without_eos_is_refused(tmp_path):
    config = TrainConfig()
    config.model.pretrained_model_name_or_path = str(save_word_tokenizer(tmp_path, eos_token=None))
    with pytest.raises(ConfigError, match="no eos token"):
        load_tokenizer(config)


def test_absent_tokenizer_folder_is_refused_before_transformers_is_needed():
    config = TrainConfig()
    config.data.tokenizer = "./no/such/folder"
    with pytest.raises(ConfigError, match="no such folder"):
        check_data(config)
