"""What can be refused about the data before any process starts: settings, files, and small corpora in full."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from automodel.config.errors import ConfigError
from automodel.config.schema import DataConfig, TrainConfig
from automodel.data.documents import check_utf8, is_jsonl
from automodel.data.split import CorpusFiles, corpus_files, load_documents
from automodel.data.tokenizer import check_tokenizer_path, names_byte_tokenizer

# Reading and parsing this much takes about a second. What a larger corpus hides is refused while it loads.
_FULL_CHECK_BYTES = 64 * 2**20


def check_data(config: TrainConfig) -> None:
    """Refuse data settings that cannot work. Imports neither torch nor transformers.

    A corpus of up to 64 MiB is read and parsed here in full; a larger one is checked as it is loaded.

    Raises:
        ConfigError: a setting outside its range or that the source does not read, a pattern without files, a
            record without the text field, a file that is not UTF-8 where the tokenizer needs it, or fewer tokens
            than one sample.
    """
    check_settings(config.data)
    check_tokenizer_path(config)
    files = corpus_files(config.data)
    check_text_field(config.data, files)
    bytes_are_tokens = names_byte_tokenizer(config)
    paths = [*files.train, *(files.validation or [])]
    sizes = [_size(path) for path in paths]
    if config.data.source == "stdlib" and bytes_are_tokens:
        # Known files, where every byte is a token: their sizes say it all.
        count = len(files.train)
        check_token_count(config, _tokens(sizes[:count]), _tokens(sizes[count:]))
    elif sum(sizes) <= _FULL_CHECK_BYTES:
        train, validation = load_documents(config.data, files)
        if bytes_are_tokens:
            lengths = [[len(document.text) for document in documents] for documents in (train, validation)]
            check_token_count(config, _tokens(lengths[0]), _tokens(lengths[1]))
        else:
            check_utf8("data.files", [*train, *validation])
            check_not_empty(config, len(train))


def check_settings(data: DataConfig) -> None:
    """Refuse values outside their range and settings that the chosen source does not read.

    Raises:
        ConfigError: names the setting.
    """
    if not 0 <= data.mask_labels <= 1:
        raise ConfigError("data.mask_labels", data.mask_labels, "this is a share of the labels", "0.0 to 1.0")
    if not 0 <= data.val_fraction < 1:
        rule = "this is a share of the documents, and some must be left to train on"
        raise ConfigError("data.val_fraction", data.val_fraction, rule, "0.0 (no validation) to below 1.0")
    if data.val_max_samples is not None and data.val_max_samples < 1:
        legal = "1, 2, ..., or null for all; data.val_fraction=0 for no validation"
        raise ConfigError("data.val_max_samples", data.val_max_samples, "a number of samples must be at least 1", legal)
    fraction_set = data.val_fraction != DataConfig().val_fraction
    if data.source == "stdlib":
        for name in ("files", "val_files", "text_field"):
            if getattr(data, name) is not None:
                rule = "the source stdlib has its own files and does not read this setting"
                raise ConfigError(f"data.{name}", getattr(data, name), rule, "leave it out, or data=text")
        if fraction_set:
            rule = "the source stdlib holds out a fixed tenth of its files and does not read this setting"
            raise ConfigError("data.val_fraction", data.val_fraction, rule, "leave it out, or data=text")
    elif data.files is None:
        raise ConfigError("data.files", None, "the source text needs files", "a path or glob, or a list of them")
    elif data.val_files is not None and fraction_set:
        rule = "data.val_files says what is held out, so there is no fraction to choose"
        raise ConfigError("data.val_fraction", data.val_fraction, rule, "leave out one of the two")


def check_text_field(data: DataConfig, files: CorpusFiles) -> None:
    """``data.text_field`` is needed by ``.jsonl`` files and read by no others.

    Raises:
        ConfigError: it is missing, or idle.
    """
    lines = [path for path in [*files.train, *(files.validation or [])] if is_jsonl(path)]
    if lines and data.text_field is None:
        legal = "the name of the field that holds the text, for example data.text_field=text"
        raise ConfigError("data.text_field", None, f"{lines[0]} holds a JSON object a line", legal)
    if data.text_field is not None and not lines:
        rule = "only .jsonl files have fields, and none of the files is one"
        raise ConfigError("data.text_field", data.text_field, rule, "leave it out, or files that end in .jsonl")


def check_not_empty(config: TrainConfig, documents: int) -> None:
    """Refuse a corpus without a single document to train on.

    Raises:
        ConfigError: there is none.
    """
    if documents == 0:
        rule = "no text is left to train on"
        legal = "files that are not empty and not all held out by data.val_files or data.val_fraction"
        raise ConfigError(*_corpus_name(config.data), rule, legal)


def check_token_count(config: TrainConfig, train: int, validation: int) -> None:
    """Refuse a corpus, or a held-out part, that is shorter than one sample of seq_length + 1 tokens.

    Args:
        config: the run.
        train: number of tokens to train on, each document's closing eos included.
        validation: the same of the held-out part; 0 is refused where one was asked for.

    Raises:
        ConfigError: gives both numbers.
    """
    check_not_empty(config, train)
    data = config.data
    needed = config.training.seq_length + 1
    if train < needed:
        rule = f"{train} tokens to train on are fewer than one sample, seq_length + 1 = {needed}"
        raise ConfigError(*_corpus_name(data), rule, f"more text, or training.seq_length of at most {train - 1}")
    wanted = data.source == "stdlib" or data.val_files is not None or data.val_fraction > 0
    if wanted and validation < needed:
        rule = f"{validation} held-out tokens are fewer than one sample, seq_length + 1 = {needed}"
        if data.val_files is not None:
            raise ConfigError("data.val_files", data.val_files, rule, "more text, or a smaller training.seq_length")
        if data.source == "stdlib":
            raise ConfigError(*_corpus_name(data), rule, f"training.seq_length of at most {validation - 1}")
        legal = "0 (no validation), a larger fraction, or data.val_files"
        raise ConfigError("data.val_fraction", data.val_fraction, rule, legal)


def _corpus_name(data: DataConfig) -> tuple[str, object]:
    return ("data.source", "stdlib") if data.source == "stdlib" else ("data.files", data.files)


def _tokens(lengths: Iterable[int]) -> int:
    """Tokens of non-empty documents of so many bytes, with the eos that closes each."""
    return sum(length + 1 for length in lengths if length)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        rule = f"the file cannot be read ({error.strerror or error})"
        raise ConfigError("data.files", path, rule, "files that can be read") from error
