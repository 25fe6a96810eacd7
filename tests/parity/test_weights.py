"""Pretrained weights in every layout against one process with the same files, and exports against its exports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.cases import TINY_LLAMA, Case, Outcome
from tests.parity.compare import differences
from tests.parity.ranks import Ranks
from tests.parity.weights_cases import Reading, load_train_export, readings

# Nothing divides: a vocabulary of 67 and 5 layers.
LLAMA = {**TINY_LLAMA, "num_hidden_layers": 5}
_WITHOUT_HEAD_DIM = {name: value for name, value in LLAMA.items() if name != "head_dim"}
# name -> (model type, fields, dtype of the files, bytes of one file)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], torch.dtype, int]] = {
    "llama": ("llama", LLAMA, torch.float32, 10**9),
    "llama_sharded": ("llama", {**LLAMA, "attention_bias": True}, torch.float32, 60_000),
    "llama_bf16": ("llama", LLAMA, torch.bfloat16, 10**9),
    "llama_fp16": ("llama", LLAMA, torch.float16, 60_000),
    "tied": ("qwen2", {**_WITHOUT_HEAD_DIM, "tie_word_embeddings": True}, torch.float32, 10**9),
    "tied_with_head": ("llama", {**LLAMA, "tie_word_embeddings": True}, torch.float32, 10**9),
    # Its head has another name in the files.
    "renamed": (
        "gpt_neox",
        {name: value for name, value in _WITHOUT_HEAD_DIM.items() if name != "num_key_value_heads"},
        torch.float32,
        10**9,
    ),
    "fused": ("phi3", {**_WITHOUT_HEAD_DIM, "pad_token_id": 3}, torch.float32, 10**9),
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name -> a folder that transformers wrote."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            model_type, fields, dtype, file_bytes = CHECKPOINTS[name]
            folder = made[name] = tmp_path_factory.mktemp(name)
            torch.manual_seed(11)
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**fields), dtype=dtype)
            model.save_pretrained(folder, max_shard_size=file_bytes)
            if name == "tied_with_head":
                tensors = load_file(folder / "model.safetensors")
                head = tensors["model.embed_tokens.weight"].clone()
                save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
        return made[name]

    return get


def pretrained(folder: Path, distributed: dict[str, Any]) -> Case:
    pipelined = distributed.get("pp_size", 1) > 1
    return Case(
        model={"vocab_size": 67},
        distributed=distributed,
        settings={
            "model": {"model_type": None, "pretrained_model_name_or_path": str(folder), "init": "pretrained"},
            "training": {"local_batch_size": 8 if pipelined else 2},
        },
        steps=2,
    )


TP2 = {"tp_size": 2}
PP2 = {"pp_size": 2, "pipeline": {"pp_schedule": "1f1b"}}
# layout -> (world size, checkpoint, distributed)
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp2_dp2": (2, "llama", {}),
    "hsdp_2x2": (4, "llama_sharded", {"dp_replicate_size": 2}),
    "ddp2": (2, "llama_sharded", {"strategy": "ddp"}),
    "dp2_bf16": (2, "llama_bf16", {}),
    "tp2_fp16": (2, "llama_fp16", TP2),
    "dp2_cpu_offload": (2, "llama", {"offload_policy": "cpu"}),
    "dp2_tp2": (4, "llama_sharded", TP2),
    "dp2_tp2_sequence_tied": (4, "tied", {**TP2, "sequence_parallel": True}),
    "tp4_two_key_value_heads": (4, "llama", {"tp_size": 4}),
    "tp2_renamed": (2, "renamed", TP2),
    "tp2_fused": (2, "fused", TP2),
    "dp4_tied_with_head": (4, "tied_with_head", {}),
    "pp2": (2, "llama", PP2),
    "pp2_interleaved_tied": (2, "tied_with_head", {"pp_size": 2, "pipeline": {"pp_schedule": "interleaved_1f1b"}}),
    "pp2_tp2_tied": (4, "tied", {**PP2, **TP2}),
    "pp2_dp2": (4, "llama_sharded", PP2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_loads_trains_and_exports_as_one_process(
    name: str,
    checkpoint: Callable[[str], Path],
    ranks: Callable[[int], Ranks],
    reference: Callable[[Case], Outcome],
    alone: Callable[[str], dict[str, bytes]],
    tmp_path: Path,
) -> None:
    world_size, source, distributed = LAYOUTS[name]
    case = pretrained(checkpoint(source), distributed)
    outcome = ranks(world_size).run(
        "tests.parity.weights_cases:load_train_export", case, world_size, str(tmp_path / "hf")
    )
    assert differences(outcome, reference(case)) == []
    assert contents(tmp_path / "hf") == alone(source)
    assert not list(tmp_path.glob(".hf*"))


@pytest.fixture(scope="session")
def alone(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, bytes]]:
    """Checkpoint -> files that one process writes after loading it."""
    known: dict[str, dict[str, bytes]] = {}

    def get(name: str) -> dict[str, bytes]:
        if name not in known:
            folder = tmp_path_factory.mktemp("alone") / "hf"
            load_train_export(pretrained(checkpoint(name), {}), 1, str(folder))
            known[name] = contents(folder)
        return known[name]

    return get


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_one_process_writes_what_transformers_wrote(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    dtype = CHECKPOINTS[name][2]
    load_train_export(pretrained(checkpoint(name), {}), 1, str(tmp_path / "hf"), str(dtype).removeprefix("torch."))
    theirs, ours = tensors_of(checkpoint(name)), tensors_of(tmp_path / "hf")
    if name == "tied_with_head":
        del theirs["lm_head.weight"]
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key].dtype == dtype
        assert torch.equal(ours[key], value), key
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1


READINGS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one_process": (1, "llama_sharded", {}),
    "dp4": (4, "llama_bf16", {}),
    "hsdp_2x2": (4, "llama_sharded", {"dp_replicate_size": 2}),
    "ddp2": (2, "llama", {"strategy": "ddp"}),
    "dp2_tp2": (4, "llama_sharded", TP2),
    "pp2_dp2": (4, "llama", PP2),
    "dp4_tied_with_head": (4, "tied_with_head", {}),
}


@pytest.mark.parametrize("name", READINGS)
def test_each_rank_reads_its_share_of_the_files(
    name: str, checkpoint: Callable[[str], Path], ranks: Callable[[int], Ranks]
) -> None:
    world_size, source, distributed = READINGS[name]
    case = pretrained(checkpoint(source), distributed)
    itemsize = CHECKPOINTS[source][2].itemsize
    whole: Reading = readings(dataclasses.replace(case, distributed={}), 1, itemsize)[0]
    found: list[Reading] = (
        ranks(world_size).run("tests.parity.weights_cases:readings", case, world_size, itemsize)
        if world_size > 1
        else [whole]
    )
    assert [reading.rank for reading in found] == list(range(world_size))
    assert all(reading.read == reading.held for reading in found)
    share = {"ddp2": 1.0, "hsdp_2x2": 0.5, "one_process": 1.0}.get(name, 1.0 / world_size)
    # Uneven cuts and, under tp, the norms that every rank has.
    assert all(reading.read <= 1.1 * share * whole.read or name == "pp2_dp2" for reading in found)
    if name not in ("ddp2", "one_process"):
        copies = share * world_size
        assert sum(reading.read for reading in found) == pytest.approx(copies * whole.read, rel=0.1)


NEGATIVE_CONTROLS = {
    "every_rank_reads_the_first_slice": "dp2_tp2",
    "buffers_stay_as_meta_left_them": "fsdp2_dp2",
    "ranks_write_their_own_rows": "fsdp2_dp2",
}


@pytest.mark.parametrize("fault", NEGATIVE_CONTROLS)
def test_comparison_notices_fault(
    fault: str,
    checkpoint: Callable[[str], Path],
    ranks: Callable[[int], Ranks],
    reference: Callable[[Case], Outcome],
    alone: Callable[[str], dict[str, bytes]],
    tmp_path: Path,
) -> None:
    world_size, source, distributed = LAYOUTS[NEGATIVE_CONTROLS[fault]]
    case = pretrained(checkpoint(source), distributed)
    outcome = ranks(world_size).run(
        "tests.parity.weights_cases:load_train_export",
        case,
        world_size,
        str(tmp_path / "hf"),
        fault=f"tests.parity.weights_cases:{fault}",
    )
    if fault == "ranks_write_their_own_rows":
        assert contents(tmp_path / "hf") != alone(source)
    else:
        assert differences(outcome, reference(case)) != []
