"""Which files and documents make a corpus, what is held out, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_tokenizers import save_word_tokenizer

from automodel.config import ConfigError, TrainConfig
from automodel.config.schema import DataConfig, TrainingConfig
from automodel.data import build_data, check_data
from automodel.data.documents import Document, stdlib_files
from automodel.data.split import corpus_files, cut_document, hold_out

EOS = 258


def text_config(seq_length: int = 4, **data: object) -> TrainConfig:
    return TrainConfig(
        data=DataConfig(source="text", **data),  # type: ignore[arg-type]
        training=TrainingConfig(seq_length=seq_length),
    )


def write_files(folder: Path, count: int) -> list[str]:
    """``00.txt``, ``01.txt``, ...: each holds its own number, ten times."""
    texts = [f"{number:02d}" * 10 for number in range(count)]
    for number, text in enumerate(texts):
        (folder / f"{number:02d}.txt").write_text(text)
    return texts


def write_lines(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def documents(tokens: np.ndarray) -> list[bytes]:
    """The documents that a row of byte tokens holds; checks that eos closes each."""
    assert tokens[-1] == EOS
    ends = np.flatnonzero(tokens == EOS)
    starts = [0, *(ends[:-1] + 1)]
    return [bytes(tokens[start:end].astype(np.uint8)) for start, end in zip(starts, ends, strict=True)]


def refusal(config: TrainConfig) -> ConfigError:
    """The error of the launcher's check; building the data must refuse the same."""
    with pytest.raises(ConfigError) as checked:
        check_data(config)
    with pytest.raises(ConfigError) as built:
        build_data(config)
    assert str(built.value) == str(checked.value)
    return checked.value


def test_stdlib_is_its_sorted_source_without_tests_and_third_parties():
    files = stdlib_files()
    names = [path.as_posix() for path in files]
    assert len(names) > 300
    assert any(name.endswith("/argparse.py") for name in names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(Path(name).parts)]
    assert files == stdlib_files()


def test_every_tenth_stdlib_file_is_held_out():
    files = stdlib_files()
    split = corpus_files(DataConfig())
    assert split.validation == files[9::10]
    assert sorted([*split.train, *files[9::10]]) == sorted(files)


def test_default_corpus_builds_with_256_held_out_samples():
    config = TrainConfig()
    check_data(config)
    bundle = build_data(config)
    assert len(bundle.validation) == 256
    assert len(bundle.train) > 20_000
    assert bundle.max_token_id == EOS


def test_files_are_documents_in_sorted_order_and_the_held_out_are_not_trained_on(tmp_path):
    texts = write_files(tmp_path, 20)
    bundle = build_data(text_config(files=str(tmp_path / "*.txt"), val_max_samples=None))
    held_out = [texts[9], texts[19]]
    assert documents(bundle.validation.tokens) == [text.encode() for text in held_out]
    assert documents(bundle.train.tokens) == [text.encode() for text in texts if text not in held_out]


def test_val_files_are_taken_out_of_training(tmp_path):
    texts = write_files(tmp_path, 3)
    config = text_config(files=str(tmp_path / "*.txt"), val_files=[str(tmp_path / "01.txt")])
    check_data(config)
    bundle = build_data(config)
    assert documents(bundle.train.tokens) == [texts[0].encode(), texts[2].encode()]
    assert documents(bundle.validation.tokens) == [texts[1].encode()]


def test_the_split_does_not_depend_on_the_seed(tmp_path):
    write_files(tmp_path, 20)
    config = text_config(files=str(tmp_path / "*.txt"), val_max_samples=None)
    first = build_data(config)
    config.seed = 7
    assert build_data(config).validation.fingerprint == first.validation.fingerprint


def test_jsonl_is_one_document_a_line_blank_lines_and_empty_texts_left_out(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"body": "erste Größe"}\n\n{"body": ""}\n{"body": "two\\nlines", "other": 1}\n')
    config = text_config(files=[str(path)], text_field="body", val_fraction=0.0)
    check_data(config)
    bundle = build_data(config)
    assert documents(bundle.train.tokens) == ["erste Größe".encode(), b"two\nlines"]
    assert bundle.validation is None


def test_a_single_document_has_its_last_lines_held_out(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"line {number:03d}\n" for number in range(100)))
    config = text_config(files=str(tmp_path / "book.txt"))
    check_data(config)
    bundle = build_data(config)
    (train,), (held_out,) = documents(bundle.train.tokens), documents(bundle.validation.tokens)
    assert train.endswith(b"line 089\n")
    assert held_out.startswith(b"line 090\n")


def test_a_single_line_is_cut_between_characters():
    text = "ü" * 101
    (train,), (held_out,) = cut_document(Document(text.encode(), "one"), 0.1)
    assert train.text.decode() + held_out.text.decode() == text


@pytest.mark.parametrize(
    ("count", "fraction", "held_out"),
    [(10, 0.1, [9]), (30, 0.1, [9, 19, 29]), (3, 0.1, [2]), (1, 0.1, []), (6, 0.5, [1, 3, 5]), (5, 0.0, [])],
)
def test_the_fraction_is_held_out_evenly_and_at_least_one_of_several(count, fraction, held_out):
    kept, chosen = hold_out(range(count), fraction)
    assert chosen == held_out
    assert sorted(kept + chosen) == list(range(count))


def test_non_utf8_files_are_bytes_to_the_byte_tokenizer_and_refused_by_name_otherwise(tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 and more")
    config = text_config(files=str(latin), val_fraction=0.0)
    check_data(config)
    assert documents(build_data(config).train.tokens) == [b"caf\xe9 and more"]
    config.data.tokenizer = str(save_word_tokenizer(tmp_path / "words"))
    error = refusal(config)
    assert error.value == str(latin)
    assert "not UTF-8 (byte 3)" in error.rule


def test_another_tokenizer_trains_on_its_ids(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat the cat")
    words = save_word_tokenizer(tmp_path / "words")
    bundle = build_data(text_config(2, files=str(tmp_path / "a.txt"), tokenizer=str(words), val_fraction=0.0))
    assert bundle.train.tokens.tolist() == [1, 2, 3, 1, 2, 4]
    assert bundle.max_token_id == 4


def test_text_without_files_is_refused():
    assert refusal(text_config()).key == "data.files"


def test_pattern_without_a_file_is_refused_by_name(tmp_path):
    write_files(tmp_path, 2)
    error = refusal(text_config(files=[str(tmp_path / "*.txt"), str(tmp_path / "*.md")]))
    assert (error.key, error.value) == ("data.files", str(tmp_path / "*.md"))


def test_a_folder_is_refused_with_the_pattern_to_write(tmp_path):
    error = refusal(text_config(files=str(tmp_path)))
    assert "a folder is not a pattern" in error.rule
    assert error.hint.startswith(f"{tmp_path}/**/*.txt")


def test_jsonl_without_a_text_field_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "abc"}])
    error = refusal(text_config(files=str(path)))
    assert (error.key, error.value) == ("data.text_field", None)


def test_text_field_without_jsonl_is_refused(tmp_path):
    write_files(tmp_path, 2)
    assert refusal(text_config(files=str(tmp_path / "*.txt"), text_field="text")).key == "data.text_field"


def test_record_without_the_field_is_refused_with_file_and_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "abcdefgh"}, {"body": "x", "title": "y"}])
    error = refusal(text_config(files=str(path), text_field="text"))
    assert f"{path}:2" in error.rule
    assert error.legal == "'body', 'title'"


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{broken", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"text": 3}', "not a text but int"),
        ('{"text": "\\ud800"}', "surrogate"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_record_is_refused_with_file_and_line(tmp_path, line, rule):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a fine record"}\n' + line + "\n")
    error = refusal(text_config(files=str(path), text_field="text"))
    assert f"{path}:2" in f"{error.value} {error.rule}"
    assert rule in error.rule


def test_empty_corpus_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert "no text is left" in refusal(text_config(files=str(tmp_path / "*.txt"))).rule


def test_corpus_wholly_held_out_is_refused(tmp_path):
    write_files(tmp_path, 2)
    error = refusal(text_config(files=str(tmp_path / "*.txt"), val_files=str(tmp_path / "*.txt")))
    assert "no text is left" in error.rule


def test_fewer_tokens_than_one_sample_are_refused_with_both_numbers(tmp_path):
    (tmp_path / "short.txt").write_text("abcdefgh")
    config = text_config(9, files=str(tmp_path / "short.txt"), val_fraction=0.0)
    error = refusal(config)
    assert "9 tokens to train on are fewer than one sample, seq_length + 1 = 10" in error.rule
    config.training.seq_length = 8
    check_data(config)
    assert len(build_data(config).train) == 1


def test_held_out_part_shorter_than_one_sample_is_refused(tmp_path):
    write_files(tmp_path, 20)
    error = refusal(text_config(60, files=str(tmp_path / "*.txt")))
    assert error.key == "data.val_fraction"


def test_sequence_longer_than_the_standard_library_is_refused():
    config = TrainConfig()
    config.training.seq_length = 10**9
    assert refusal(config).key == "data.source"


@pytest.mark.parametrize(
    "setting",
    [{"files": "a.txt"}, {"val_files": "a.txt"}, {"text_field": "text"}, {"val_fraction": 0.2}],
)
def test_settings_that_stdlib_does_not_read_are_refused(setting):
    error = refusal(TrainConfig(data=DataConfig(**setting)))
    assert error.key == f"data.{next(iter(setting))}"


@pytest.mark.parametrize(
    ("name", "value"), [("mask_labels", 1.5), ("mask_labels", -0.1), ("val_max_samples", 0), ("val_fraction", 1.0)]
)
def test_values_outside_their_range_are_refused(name, value):
    assert refusal(TrainConfig(data=DataConfig(**{name: value}))).key == f"data.{name}"


def test_checks_import_neither_torch_nor_transformers():
    code = (
        "import sys; from automodel.config import TrainConfig; import automodel.data as data; "
        "data.check_data(TrainConfig()); print({'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"
