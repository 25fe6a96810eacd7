"""A checkpoint to a folder that ``AutoModelForCausalLM.from_pretrained`` loads; needs one process and no GPU.

    python -m automodel.export <run folder>/checkpoints/step_<N> <new folder> [--dtype bfloat16]

Tensors are read and written one by one, so a model of any size passes through little memory. Exit codes: as of
``train.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from automodel.config.errors import ConfigError
from automodel.config.schema import DTypeName, TrainConfig, load
from automodel.launch.errors import EXIT_FAILED, EXIT_REFUSED

if TYPE_CHECKING:
    from automodel.training.checkpoint.folder import Checkpoint

__all__ = ["export_checkpoint", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m automodel.export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="a step_<N> folder")
    parser.add_argument("folder", type=Path, help="to be made; must not exist")
    parser.add_argument("--dtype", choices=get_args(DTypeName), help="of the weights; default: the run's export_dtype")
    arguments = parser.parse_args(argv)
    # Imported late: --help and a refused request do not wait for it.
    from automodel.model.export import ExportError

    try:
        export_checkpoint(arguments.checkpoint, arguments.folder, arguments.dtype)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    except ExportError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    print(f"wrote {arguments.folder}")
    return 0


def export_checkpoint(path: Path, folder: Path, dtype_name: DTypeName | None = None) -> None:
    """Write the model of a checkpoint, with configuration and tokenizer, to ``folder``.

    Args:
        path: of a whole checkpoint.
        folder: must not exist.
        dtype_name: of the weights; None: ``checkpoint.export_dtype`` of the run.

    Raises:
        ConfigError: the checkpoint is not whole or not of a model that can be written, or the folder exists.
        ExportError: it could not be written.
    """
    from automodel.training.checkpoint.folder import DamagedCheckpoint, read_checkpoint

    if folder.exists():
        raise ConfigError("folder", folder, "it exists already", "a new folder")
    try:
        checkpoint = read_checkpoint(path)
    except DamagedCheckpoint as error:
        raise ConfigError("checkpoint", path, str(error), "a whole step_<N> folder") from error
    config = _config(checkpoint)
    if dtype_name is not None:
        config.checkpoint.export_dtype = dtype_name
    _write(checkpoint, config, folder)


def _config(checkpoint: Checkpoint) -> TrainConfig:
    """Of the run, without what an export does not need."""
    saved = checkpoint.index["config"]
    return load({name: saved[name] for name in ("model", "data", "checkpoint")})


def _write(checkpoint: Checkpoint, config: TrainConfig, folder: Path) -> None:
    from torch import Tensor

    from automodel.data.tokenizer import load_tokenizer
    from automodel.distributed.mixed_precision import dtype_of
    from automodel.model.build import build_config, build_model
    from automodel.model.checkpoint_names import NeedsConversion, saved_tensors
    from automodel.model.export import planned_tensors, write_export
    from automodel.model.safetensors_writer import OutputTensor, plan_files
    from automodel.training.checkpoint.folder import DamagedCheckpoint
    from automodel.training.checkpoint.loader import check_same_model
    from automodel.training.checkpoint.pieces import MODEL
    from automodel.training.checkpoint.storage import PieceReader
    from automodel.training.consolidated import side_files

    model = build_model(build_config(config.model), config.model)
    try:
        tensors = saved_tensors(model)
    except NeedsConversion as error:
        raise ConfigError(
            "checkpoint", checkpoint.path, f"models like this one cannot be written yet: {error}", "another model"
        ) from error
    check_same_model(checkpoint, {tensor.name: tensor.shape for tensor in tensors})
    reader = PieceReader(checkpoint, 0, 1)
    try:
        reader.set_up_storage_reader(reader.read_metadata(), True)
    except DamagedCheckpoint as error:
        raise ConfigError("checkpoint", checkpoint.path, str(error), "a checkpoint that is whole") from error
    dtype = dtype_of(config.checkpoint.export_dtype)
    assert dtype is not None
    names = {tensor.key: tensor.name for tensor in tensors}

    def fetch(output: OutputTensor, writer: int) -> Tensor:
        return reader.read_whole(f"{MODEL}.{names[output.key]}").to(output.dtype)

    files = plan_files(planned_tensors(tensors, dtype))
    write_export(files, folder, fetch, side_files(config, type(model).__name__, load_tokenizer(config)))


if __name__ == "__main__":
    sys.exit(main())
