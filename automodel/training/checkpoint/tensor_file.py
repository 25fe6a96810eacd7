"""Writing a safetensors file tensor by tensor, with a checksum on the way.

The library's own ``save_file`` wants all tensors in the memory of the CPU at once.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automodel.model.safetensors_files import DTYPE_NAMES

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_ALIGNMENT = 8


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> tuple[int, int]:
    """Write tensors, one at a time, so that at most one is in the memory of the CPU; synced to the disk.

    Returns:
        the file's size in bytes and its CRC-32.
    """
    header: dict[str, Any] = {}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    size, checksum = 0, 0
    with open(path, "wb", buffering=0) as file:
        for data in _parts(len(text).to_bytes(8, "little") + text, tensors):
            view = memoryview(data)
            checksum = zlib.crc32(view, checksum)
            size += len(view)
            while len(view):
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return size, checksum


def _parts(header: bytes, tensors: dict[str, Tensor]) -> Any:
    yield header
    for tensor in tensors.values():
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
