"""Which documents are trained on and which are held out: a function of a document's place, never of the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

from automodel.config.schema import DataConfig
from automodel.data.documents import Document, matching_files, read_documents, stdlib_files

T = TypeVar("T")
STDLIB_VAL_FRACTION = 0.1


@dataclass(frozen=True)
class CorpusFiles:
    """The files of a corpus. ``validation`` is None where documents of ``train`` are held out instead."""

    train: list[Path]
    validation: list[Path] | None


def corpus_files(data: DataConfig) -> CorpusFiles:
    """Find the files. What ``data.val_files`` names is not trained on, also where ``data.files`` matches it.

    Raises:
        ConfigError: a pattern matches no file.
    """
    if data.source == "stdlib":
        train, validation = hold_out(stdlib_files(), STDLIB_VAL_FRACTION)
        return CorpusFiles(train, validation)
    assert data.files is not None
    files = matching_files("data.files", data.files)
    if data.val_files is None:
        return CorpusFiles(files, None)
    held_out = matching_files("data.val_files", data.val_files)
    resolved = {path.resolve() for path in held_out}
    return CorpusFiles([path for path in files if path.resolve() not in resolved], held_out)


def load_documents(data: DataConfig, files: CorpusFiles) -> tuple[list[Document], list[Document]]:
    """The documents to train on and those held out.

    Raises:
        ConfigError: as :func:`automodel.data.documents.read_documents`.
    """
    train = list(read_documents("data.files", files.train, data.text_field))
    if files.validation is not None:
        return train, list(read_documents("data.val_files", files.validation, data.text_field))
    if len(train) == 1 and data.val_fraction:
        return cut_document(train[0], data.val_fraction)
    return hold_out(train, data.val_fraction)


def hold_out(items: Sequence[T], fraction: float) -> tuple[list[T], list[T]]:
    """Split ``items`` into (kept, held out), the held out spread evenly: every tenth for 0.1.

    Where the fraction of few items would be none, the last one is held out. A fraction of 0 holds out nothing.
    """
    # Exact arithmetic on the decimal that the user wrote: 10 * 0.1 must be one whole item on every machine.
    exact = Fraction(str(fraction))
    chosen = {index for index in range(len(items)) if int((index + 1) * exact) > int(index * exact)}
    if exact and not chosen and len(items) > 1:
        chosen = {len(items) - 1}
    kept = [item for index, item in enumerate(items) if index not in chosen]
    return kept, [items[index] for index in sorted(chosen)]


def cut_document(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    """Split a corpus of one document: its end is held out, from a line's beginning if it has lines."""
    text = document.text
    cut = int(len(text) * (1 - fraction))
    line_end = text.rfind(b"\n", 0, cut)
    if line_end >= 0:
        cut = line_end + 1
    else:
        # Bytes 10xxxxxx continue a UTF-8 character.
        while 0 < cut < len(text) and text[cut] & 0xC0 == 0x80:
            cut -= 1
    parts = [Document(part, document.origin) for part in (text[:cut], text[cut:])]
    return [part for part in parts[:1] if part.text], [part for part in parts[1:] if part.text]
