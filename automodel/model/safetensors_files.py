"""The safetensors files of a checkpoint folder or hub name: where they are, what they hold, slices of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from automodel.config.errors import ConfigError
from automodel.model.hub_files import PATH_KEY, find_file

__all__ = ["Run", "SafetensorsFiles"]

SINGLE = "model.safetensors"
# Names of dtypes in safetensors files.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
INDEX = "model.safetensors.index.json"
Run = tuple[int, int]


@dataclass(frozen=True)
class StoredTensor:
    """What a file's header says of a tensor; ``dtype`` as safetensors spells it, e.g. BF16."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class SafetensorsFiles:
    """The tensors of a checkpoint. Headers are read at once, data only on demand.

    Args:
        name_or_path: a folder, or a model on the hub.
        download: see :func:`automodel.model.hub_files.find_file`.

    Attributes:
        tensors: by key.
        bytes_read: of data, by :meth:`read_into`.

    Raises:
        ConfigError: there are no such files, only pickled ones, or damaged ones.
    """

    def __init__(self, name_or_path: str, download: bool = True) -> None:
        self.name = name_or_path
        self.download = download
        self.bytes_read = 0
        self.tensors: dict[str, StoredTensor] = {}
        self._open: dict[Path, Any] = {}
        paths, indexed = self._locate()
        for path in paths:
            for key, stored in self._header(path):
                self.tensors[key] = stored
        absent = sorted(indexed - self.tensors.keys())
        if absent:
            raise self._refusal(f"its index names tensors that no file holds: {', '.join(absent[:5])}")

    def read_into(self, key: str, target: Tensor, runs: Sequence[Sequence[Run]]) -> None:
        """Read a block of a tensor; the files are mapped, so nothing else of it is touched.

        Args:
            target: of any dtype and device, in the block's shape.
            runs: for each dim, the ranges [start, end) of the whole tensor that follow each other in the block.
        """
        stored = self.tensors[key]
        if stored.file not in self._open:
            self._open[stored.file] = safe_open(stored.file, "pt")
        file = self._open[stored.file]
        if not runs:
            blocks = [(target, file.get_tensor(key))]
        else:
            view = file.get_slice(key)
            blocks = [
                (target[tuple(to for to, _ in block)], view[tuple(whole for _, whole in block)])
                for block in itertools.product(*map(_placed, runs))
            ]
        for part, data in blocks:
            part.copy_(data)
            self.bytes_read += data.numel() * data.element_size()

    def same(self, key: str, other: str) -> bool:
        """Whether two stored tensors are equal; read in pieces."""
        stored = self.tensors[key]
        if stored.shape != self.tensors[other].shape:
            return False
        with safe_open(stored.file, "pt") as file, safe_open(self.tensors[other].file, "pt") as other_file:
            ours, theirs = file.get_slice(key), other_file.get_slice(other)
            rows = max(1, 2**24 // max(1, stored.shape[-1]))
            starts = range(0, stored.shape[0], rows)
            return all(torch.equal(ours[start : start + rows], theirs[start : start + rows]) for start in starts)

    def close(self) -> None:
        """Unmap the files."""
        self._open.clear()

    def _locate(self) -> tuple[list[Path], set[str]]:
        """Files, and the keys that an index names."""
        single = self._find(SINGLE)
        if single is not None:
            return [single], set()
        index = self._find(INDEX)
        if index is None:
            raise self._without_safetensors()
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._refusal(f"{INDEX} is damaged ({type(error).__name__}: {error})") from error
        paths = []
        for name in sorted(set(weight_map.values())):
            path = self._find(name)
            if path is None:
                raise self._refusal(f"its index names {name}, which is not there")
            paths.append(path)
        return paths, set(weight_map)

    def _find(self, file: str) -> Path | None:
        return find_file(self.name, file, self.download)

    def _without_safetensors(self) -> ConfigError:
        pickled = [name for name in ("pytorch_model.bin.index.json", "pytorch_model.bin") if self._find(name)]
        if not pickled:
            return self._refusal(f"it has neither {SINGLE} nor {INDEX}")
        return ConfigError(
            PATH_KEY,
            self.name,
            f"its weights are pickled ({pickled[0]}), and unpickling can run any code",
            'a folder with safetensors, made once where the file is trusted: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{self.name}').save_pretrained('converted')\"",
        )

    def _header(self, path: Path) -> Iterator[tuple[str, StoredTensor]]:
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    view = file.get_slice(key)
                    yield key, StoredTensor(path, tuple(view.get_shape()), view.get_dtype())
        except (SafetensorError, OSError) as error:
            raise self._refusal(f"{path.name} is damaged ({error})") from error

    def _refusal(self, rule: str) -> ConfigError:
        return ConfigError(
            PATH_KEY,
            self.name,
            rule,
            "a folder or hub name with whole safetensors files, or model.init=random",
        )


def _placed(runs: Sequence[Run]) -> list[tuple[slice, slice]]:
    """For each run, its place in the block and in the whole tensor."""
    places, offset = [], 0
    for start, end in runs:
        places.append((slice(offset, offset + end - start), slice(start, end)))
        offset += end - start
    return places
