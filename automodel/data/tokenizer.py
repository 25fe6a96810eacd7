"""Text to token ids: a byte-level tokenizer that needs no download, or any Hugging Face tokenizer.

Documents never contain control tokens: the characters ``<|eos|>`` in a text are encoded as characters.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel.config.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from automodel.config.schema import TrainConfig

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
BYTE_VOCABULARY_SIZE = 259
# Any of these in a model's folder means that the model comes with its own tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
# A tokenizer.json of the byte tokenizer has about 9 kB; larger ones are not opened to find out.
_BYTE_FILE_LIMIT = 65536
_BATCH_OF_DOCUMENTS = 256


@functools.cache
def byte_vocabulary() -> dict[str, int]:
    """Token string -> id of the 256 bytes, where the id is the byte's value.

    The strings are GPT-2's printable stand-ins for bytes, which the ``ByteLevel`` pre-tokenizer produces:
    printable characters of Latin-1 stand for themselves, the others for code points from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    vocabulary: dict[str, int] = {}
    stand_in = 256
    for byte in range(256):
        if byte in printable:
            vocabulary[chr(byte)] = byte
        else:
            vocabulary[chr(stand_in)] = byte
            stand_in += 1
    return vocabulary


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer without merges: ids 0-255 are the bytes, then pad, bos and eos (259 in all).

    Every string round-trips exactly. It saves as a plain ``tokenizer.json``, which ``AutoTokenizer`` reads.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    # use_regex splits at words, which only matters to merges.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # Named here, in this order, so that the ids do not depend on the order in which transformers adds them.
    backend.add_special_tokens([PAD, BOS, EOS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def is_byte_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True for :func:`byte_tokenizer` and for what ``AutoTokenizer`` reloads from its files."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or len(tokenizer) != BYTE_VOCABULARY_SIZE:
        return False
    return _pipeline(backend) == _byte_pipeline()


@functools.cache
def _byte_pipeline() -> dict[str, Any]:
    return _pipeline(byte_tokenizer().backend_tokenizer)


def _pipeline(backend: Any) -> dict[str, Any]:
    """What decides a text's ids. Padding and truncation are state of the last call and do not."""
    description = json.loads(backend.to_str())
    return {key: value for key, value in description.items() if key not in ("padding", "truncation", "version")}


def names_byte_tokenizer(config: TrainConfig) -> bool:
    """Whether :func:`load_tokenizer` will give the byte tokenizer, told without importing transformers."""
    name = _tokenizer_name(config)
    if name is None:
        return True
    path = Path(name) / "tokenizer.json"
    try:
        if path.stat().st_size > _BYTE_FILE_LIMIT:
            return False
        return json.loads(path.read_bytes())["model"]["vocab"] == byte_vocabulary()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def load_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    """The tokenizer ``data.tokenizer`` (a folder or hub name), else the model's own, else the byte tokenizer.

    A local model folder without tokenizer files has none of its own; a hub name must bring one.

    Raises:
        ConfigError: a named tokenizer cannot be loaded or has no end-of-sequence token.
    """
    name = _tokenizer_name(config)
    if name is None:
        return byte_tokenizer()
    key = "data.tokenizer" if config.data.tokenizer is not None else "model.pretrained_model_name_or_path"
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.model.trust_remote_code)
    # transformers raises whatever its parsers raise for a damaged file: ValueError, OSError, KeyError, Exception.
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            key,
            name,
            f"no tokenizer could be loaded from it ({reason})",
            "a folder or hub name that AutoTokenizer loads; data.tokenizer names one apart from the model",
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            key, name, "the tokenizer has no eos token, which separates documents", "a tokenizer with an eos token"
        )
    return tokenizer


def check_tokenizer_path(config: TrainConfig) -> None:
    """Refuse a ``data.tokenizer`` that is spelled as a path to a folder that is not there.

    Raises:
        ConfigError: there is no such folder.
    """
    name = config.data.tokenizer
    if name is None:
        return
    spelled_as_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if spelled_as_path and not os.path.isdir(os.path.expanduser(name)):
        raise ConfigError("data.tokenizer", name, "there is no such folder", "an existing folder, or a hub name")


def _tokenizer_name(config: TrainConfig) -> str | None:
    if config.data.tokenizer is not None:
        return os.path.expanduser(config.data.tokenizer)
    name = config.model.pretrained_model_name_or_path
    if name is None:
        return None
    folder = Path(os.path.expanduser(name))
    if folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        return None
    return os.path.expanduser(name)


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> type[np.generic]:
    """The narrowest dtype that holds every id: corpora are kept whole in each rank's memory."""
    # Imported late, also below: the checks before a run need this module, and a refusal does not wait for numpy.
    import numpy as np

    return np.uint16 if len(tokenizer) <= 2**16 else np.int32


def encode_document(tokenizer: PreTrainedTokenizerBase, text: str | bytes) -> np.ndarray:
    """Token ids [tokens] of one document, without special tokens.

    Raises:
        UnicodeDecodeError: ``text`` is bytes that are not UTF-8 and the tokenizer is not the byte tokenizer.
    """
    data = text.encode("utf-8") if isinstance(text, str) else text
    return next(encode_documents(tokenizer, [data]))


def encode_documents(tokenizer: PreTrainedTokenizerBase, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
    """Token ids [tokens] of each document in turn, without special tokens.

    The byte tokenizer's ids are the bytes themselves, so it takes any bytes and costs a copy. Any other
    tokenizer encodes in batches, which its threads share.

    Raises:
        UnicodeDecodeError: a document is not UTF-8 and the tokenizer is not the byte tokenizer.
    """
    import numpy as np

    dtype = token_dtype(tokenizer)
    if is_byte_tokenizer(tokenizer):
        for document in documents:
            yield np.frombuffer(document, dtype=np.uint8).astype(dtype)
        return
    remaining = iter(documents)
    while batch := list(islice(remaining, _BATCH_OF_DOCUMENTS)):
        for ids in _encode_batch(tokenizer, [document.decode("utf-8") for document in batch]):
            yield np.asarray(ids, dtype=dtype)


def _encode_batch(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Sequence[Sequence[int]]:
    # split_special_tokens: a corpus must not be able to end a document or start a chat turn by spelling a token.
    # verbose=False: a document longer than the model's context is normal here, it is cut into blocks.
    encoded = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )
    return encoded["input_ids"]
