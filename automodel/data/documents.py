"""Where documents come from: the files of a corpus, and the documents in them, in an order that never changes.

A document is the bytes of a UTF-8 text: a whole file, or one line's field of a ``.jsonl`` file.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from automodel.config.errors import ConfigError

# Tests are left out: they hold non-UTF-8 files and generated tables, and some systems do not ship them.
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Document:
    """One text and where it stands: ``file``, or ``file:line`` in a ``.jsonl`` file (lines from 1)."""

    text: bytes
    origin: str


def stdlib_files() -> list[Path]:
    """The ``.py`` files of this Python's standard library, sorted by their path inside it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[tuple[str, Path]] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_SKIPPED]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                found.append((path.relative_to(root).as_posix(), path))
    if not found:
        raise ConfigError(
            "data.source",
            "stdlib",
            f"this Python has no .py files in {root}",
            "data.source=text with data.files=<glob>",
        )
    return [path for _, path in sorted(found)]


def matching_files(key: str, patterns: str | Sequence[str]) -> list[Path]:
    """The files that a glob (``**`` goes through folders), a path or a list of them name, sorted, each once.

    Raises:
        ConfigError: a pattern matches no file.
    """
    found: dict[str, Path] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        expanded = os.path.expanduser(pattern)
        # A path that exists is taken as it is, so that brackets in a real name are no pattern.
        names = [expanded] if os.path.exists(expanded) else glob.glob(expanded, recursive=True)
        files = [name for name in names if os.path.isfile(name)]
        if not files:
            raise ConfigError(
                key,
                pattern,
                "a folder is not a pattern of files" if names else "no file matches",
                "a path or glob that matches files, or a list of them",
                f"{pattern.rstrip('/')}/**/*.txt takes every .txt below a folder" if names else _where(expanded),
            )
        found.update({os.path.realpath(name): Path(name) for name in sorted(files)})
    if not found:
        raise ConfigError(key, patterns, "the list is empty", "a path or glob that matches files, or a list of them")
    return sorted(found.values())


def _where(pattern: str) -> str | None:
    return None if os.path.isabs(pattern) else f"looked from {os.getcwd()}"


def is_jsonl(path: Path) -> bool:
    """Whether a file holds one JSON object a line, by its name."""
    return path.suffix.lower() == ".jsonl"


def read_documents(key: str, paths: Iterable[Path], text_field: str | None) -> Iterator[Document]:
    """The documents of ``paths`` in order; documents without a byte are left out.

    Raises:
        ConfigError: a file cannot be read, or a line of a ``.jsonl`` file is not an object with the text
            ``text_field``.
    """
    for path in paths:
        try:
            if is_jsonl(path):
                assert text_field is not None
                with path.open("rb") as lines:
                    for number, line in enumerate(lines, start=1):
                        if line.strip():
                            document = Document(_field(key, line, text_field, f"{path}:{number}"), f"{path}:{number}")
                            if document.text:
                                yield document
            else:
                text = path.read_bytes()
                if text:
                    yield Document(text, str(path))
        except OSError as error:
            raise ConfigError(
                key, path, f"the file cannot be read ({error.strerror or error})", "files that can be read"
            ) from error


def _field(key: str, line: bytes, text_field: str, origin: str) -> bytes:
    try:
        record = json.loads(line)
    # A line of ten thousand brackets is data, too, and must not end in a traceback.
    except (ValueError, RecursionError) as error:
        raise ConfigError(key, origin, f"the line is not JSON ({error})", "one JSON object a line") from error
    if not isinstance(record, dict):
        raise ConfigError(key, origin, "the line is not a JSON object", "one JSON object a line")
    if text_field not in record:
        names = [repr(name) for name in list(record)[:20]] or "objects with fields"
        raise ConfigError("data.text_field", text_field, f"the record at {origin} has no field of this name", names)
    value = record[text_field]
    if not isinstance(value, str):
        rule = f"the field of the record at {origin} is not a text but {type(value).__name__}"
        raise ConfigError("data.text_field", text_field, rule, "a field that holds a text in every record")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        rule = f"the text at {origin} has half of a surrogate pair, which no encoding can hold"
        raise ConfigError(key, origin, rule, "well-formed Unicode") from error


def check_utf8(key: str, documents: Iterable[Document]) -> None:
    """Refuse documents that a text tokenizer cannot read.

    Raises:
        ConfigError: a document is not UTF-8; names its file.
    """
    for document in documents:
        try:
            document.text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                key,
                document.origin,
                f"the file is not UTF-8 (byte {error.start}), and this tokenizer reads text",
                "UTF-8 files, or the byte tokenizer, which takes any bytes",
            ) from error
