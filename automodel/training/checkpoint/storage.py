"""torch's distributed checkpoint on safetensors files and a JSON index, in place of its pickled metadata.

torch's own file storage keeps its metadata as a pickle and reads it back with ``pickle.load`` (2.13): whoever could
write into a run folder could run code at the next resume. So the planners and the storage here are subclasses of
torch's public interfaces that put plain tensors into safetensors files and everything else into JSON.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from automodel.training.checkpoint import folder
from automodel.training.checkpoint.folder import Checkpoint, DamagedCheckpoint
from automodel.training.checkpoint.pieces import Piece
from automodel.training.checkpoint.tensor_file import DTYPE_NAMES, DTYPES, write_safetensors

_READ_BYTES = 1 << 24
_CHECK_THREADS = 4


class PieceSavePlanner(DefaultSavePlanner):
    """Plans saving :class:`Piece` objects; torch's global plan drops copies and proves that nothing is missing."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, piece in self.state_dict.items():
            if piece.tensor.numel():
                chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
                properties = TensorProperties(dtype=piece.tensor.dtype)
                data = TensorWriteData(chunk, properties, torch.Size(piece.shape))
                items.append(WriteItem(MetadataIndex(key, piece.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


@dataclass(frozen=True)
class _Written:
    """Where a chunk lies: the name of a file."""

    file: str
    bytes: int
    crc32: int


class PieceWriter(StorageWriter):
    """Writes one safetensors file for each rank, then closes the checkpoint on the coordinator.

    Args:
        partial: the folder to write into, on a disk that all ranks share.
        final: its name once whole.
        rank: names this rank's file.
        describe: the rest of the index, called once all files are written.
        on_published: called once the checkpoint is visible.
    """

    def __init__(
        self,
        partial: Path,
        final: Path,
        rank: int,
        describe: Callable[[], dict[str, Any]],
        on_published: Callable[[], None],
    ) -> None:
        super().__init__()
        self.partial = partial
        self.final = final
        self.rank = rank
        self.describe = describe
        self.on_published = on_published

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            # All ranks have made their plans before one of them writes.
            folder.start_partial(self.partial)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"rank_{self.rank}.safetensors"
        results = []
        if plan.items:
            tensors = {_entry(item.index): planner.resolve_data(item) for item in plan.items}
            written = _Written(name, *write_safetensors(self.partial / name, tensors))  # type: ignore[arg-type]
            results = [WriteResult(item.index, 0, written) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written: dict[MetadataIndex, _Written] = {r.index: r.storage_data for part in results for r in part}
        tensors: dict[str, Any] = {}
        for key, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            tensors[key] = {
                "dtype": DTYPE_NAMES[stored.properties.dtype],
                "shape": list(stored.size),
                "chunks": [
                    [written[MetadataIndex(key, chunk.offsets)].file, list(chunk.offsets), list(chunk.sizes)]
                    for chunk in stored.chunks
                ],
            }
        files = {w.file: {"bytes": w.bytes, "crc32": w.crc32} for w in written.values()}
        index = {"format": folder.FORMAT, **self.describe(), "files": files, "tensors": tensors}
        folder.publish(self.partial, self.final, index)
        self.on_published()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _entry(index: MetadataIndex) -> str:
    """Name of a chunk in its file."""
    return f"{index.fqn}@{','.join(str(offset) for offset in index.offset or ())}"


class PieceLoadPlanner(LoadPlanner):
    """Fills :class:`Piece` objects from the chunks that overlap them."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.pieces: dict[str, Piece] = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, piece in self.pieces.items():
            if piece.tensor.numel():
                stored = self.metadata.state_dict_metadata[key]
                assert isinstance(stored, TensorStorageMetadata)
                wanted = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
                items += create_read_items_for_chunk_list(key, stored, [wanted])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise RuntimeError("a checkpoint of this format has tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self.pieces[read_item.dest_index.fqn].tensor
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The target was filled in place."""


class PieceReader(StorageReader):
    """Reads what :class:`PieceWriter` wrote.

    The checksums of the files are verified once for all ranks together, each by one of them, before anything is read.

    Args:
        checkpoint: whole.
        rank, world_size: of the reading run, which may differ from the writing one.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int, world_size: int) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.rank = rank
        self.world_size = world_size
        self.files: dict[MetadataIndex, str] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any) -> Metadata:
        described: dict[str, Any] = {}
        for key, stored in self.checkpoint.index["tensors"].items():
            chunks = []
            for file, offsets, sizes in stored["chunks"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                self.files[MetadataIndex(key, offsets)] = file
            properties = TensorProperties(dtype=DTYPES[stored["dtype"]])
            described[key] = TensorStorageMetadata(properties, torch.Size(stored["shape"]), chunks)
        return Metadata(described)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        names = sorted(self.checkpoint.index["files"])[self.rank :: self.world_size]
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:
            list(pool.map(self._verify, names))

    def _verify(self, name: str) -> None:
        path = self.checkpoint.path / name
        checksum = 0
        with open(path, "rb") as file:
            while data := file.read(_READ_BYTES):
                checksum = zlib.crc32(data, checksum)
        if checksum != self.checkpoint.index["files"][name]["crc32"]:
            raise DamagedCheckpoint(f"{path} is damaged: its contents do not have the checksum they were saved with")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.files[item.storage_index], []).append(item)
        for name, items in by_file.items():
            with safe_open(self.checkpoint.path / name, framework="pt") as file:
                for item in items:
                    planner.resolve_tensor(item).copy_(_read(file, item))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_whole(self, key: str) -> Tensor:
        """One whole tensor on the CPU; of the files only its own bytes are read, and no checksum is verified."""
        stored = self.checkpoint.index["tensors"][key]
        whole = torch.empty(stored["shape"], dtype=DTYPES[stored["dtype"]])
        for name, offsets, sizes in stored["chunks"]:
            place = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            with safe_open(self.checkpoint.path / name, framework="pt") as file:
                whole[place] = file.get_tensor(_entry(MetadataIndex(key, offsets)))
        return whole

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _read(file: Any, item: ReadItem) -> Tensor:
    entry = _entry(item.storage_index)
    if not item.lengths:
        return file.get_tensor(entry)
    slices = tuple(
        slice(offset, offset + length) for offset, length in zip(item.storage_offsets, item.lengths, strict=True)
    )
    return file.get_slice(entry)[slices]
