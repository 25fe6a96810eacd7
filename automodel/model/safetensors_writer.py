"""Writes safetensors files tensor by tensor, so that no file is ever held whole.

The format (https://huggingface.co/docs/safetensors): the header's length in 8 little-endian bytes, the header as JSON,
padded with spaces, and the tensors' bytes in the order and at the offsets that it names.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from automodel.model.safetensors_files import DTYPE_NAMES, INDEX, SINGLE

__all__ = ["FileWriter", "OutputFile", "OutputTensor", "index_of", "plan_files"]

MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written: its key, and the dtype and shape that it will have."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OutputFile:
    """A file and its tensors, in the order in which they stand there."""

    name: str
    tensors: tuple[OutputTensor, ...]


def plan_files(tensors: Sequence[OutputTensor], max_bytes: int = MAX_FILE_BYTES) -> list[OutputFile]:
    """Fill files with tensors in their order; one larger than ``max_bytes`` has a file of its own.

    Which tensor goes where depends on nothing but the tensors, so every layout writes the same files.
    """
    groups: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.num_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.num_bytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    # Wide types first: every tensor then begins at a multiple of its own size.
    return [
        OutputFile(name, tuple(sorted(group, key=lambda tensor: -tensor.dtype.itemsize)))
        for name, group in zip(names, groups, strict=True)
    ]


def index_of(files: Sequence[OutputFile]) -> tuple[str, str] | None:
    """Name and text of the index of several files; None for one."""
    if len(files) == 1:
        return None
    tensors = [tensor for file in files for tensor in file.tensors]
    description = {
        "metadata": {
            "total_size": sum(tensor.num_bytes for tensor in tensors),
            "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        },
        "weight_map": {tensor.key: file.name for file in files for tensor in file.tensors},
    }
    return INDEX, json.dumps(description, indent=2) + "\n"


def _header(file: OutputFile) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in file.tensors:
        end = offset + tensor.num_bytes
        entries[tensor.key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class FileWriter:
    """Writes one file in a thread of its own, while the next tensor is being gathered; holds two tensors at most.

    An error is kept for :meth:`close`, and what comes after it is dropped: whoever gathers for this writer goes on.

    Args:
        folder: where; it exists.
        file: what will come through :meth:`put`, in this order.
    """

    def __init__(self, folder: Path, file: OutputFile) -> None:
        self._path = folder / file.name
        self._file = file
        self._queue: queue.Queue[Tensor | None] = queue.Queue(maxsize=1)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"write {file.name}", daemon=True)
        self._thread.start()

    def put(self, tensor: Tensor) -> None:
        """Take the next tensor: on the CPU, and not changed any more."""
        self._queue.put(tensor)

    def close(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            OSError: it could not be written.
            ValueError: a tensor was not the planned one.
        """
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        tensors = iter(self._queue.get, None)
        try:
            with open(self._path, "wb") as out:
                out.write(_header(self._file))
                for planned, tensor in zip(self._file.tensors, tensors, strict=False):
                    if (tensor.dtype, tuple(tensor.shape)) != (planned.dtype, planned.shape):
                        raise ValueError(f"{planned.key} is {tensor.dtype} {list(tensor.shape)}, not as announced")
                    out.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
                out.flush()
                os.fsync(out.fileno())
        except Exception as error:  # kept, so that the one who puts never waits for a dead thread
            self._error = error
        for _ in tensors:
            pass
