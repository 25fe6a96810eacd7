"""Files of pretrained weights: what is refused and how, names, hub caches, and the writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from automodel.config.errors import ConfigError
from automodel.config.schema import TrainConfig, load
from automodel.data import byte_tokenizer
from automodel.model.build import build_config, build_model
from automodel.model.checks import check_model
from automodel.model.export import ExportError, write_export
from automodel.model.safetensors_writer import FileWriter, OutputFile, OutputTensor, index_of, plan_files
from automodel.model.weights import PretrainedWeights
from automodel.training.consolidated import side_files

FIELDS: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    LlamaForCausalLM(LlamaConfig(**FIELDS)).save_pretrained(folder)
    return folder


def config_of(path: Path | str, **model: Any) -> TrainConfig:
    return load({"model": {"pretrained_model_name_or_path": str(path), **model}})


def refusal(path: Path | str, **model: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_model(config_of(path, **model), 1)
    return caught.value


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_whole_checkpoint_passes(checkpoint: Path) -> None:
    check_model(config_of(checkpoint), 1)


def test_missing_unexpected_and_misshapen_keys_are_listed_together(checkpoint: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.1.mlp.extra.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(5)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)

    change(checkpoint, edit)
    rule = refusal(checkpoint).rule
    assert "missing (1): model.layers.1.mlp.up_proj.weight" in rule
    assert "unexpected (1): model.layers.1.mlp.extra.weight" in rule
    assert "model.norm.weight is [5] in the file and [16] in the model" in rule
    assert "lm_head.weight is I8 in the file" in rule


def test_an_override_that_changes_the_model_does_not_fit(checkpoint: Path) -> None:
    rule = refusal(checkpoint, config={"num_hidden_layers": 1}).rule
    assert "unexpected (9): model.layers.1." in rule


def test_initial_weights_need_no_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    check_model(config_of(checkpoint, init="random"), 1)
    assert "neither model.safetensors nor" in refusal(checkpoint).rule


def test_pickled_weights_are_refused_with_the_way_out(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    error = refusal(checkpoint)
    assert "pytorch_model.bin" in error.rule
    assert "save_pretrained" in error.legal


def test_a_damaged_file_is_named(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert "model.safetensors is damaged" in refusal(checkpoint).rule


def test_an_index_is_held_against_its_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00001.safetensors")
    keys = list(load_file(checkpoint / "model-00001-of-00001.safetensors"))

    def index(weight_map: Any) -> None:
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    index(dict.fromkeys(keys, "model-00001-of-00001.safetensors"))
    check_model(config_of(checkpoint), 1)
    index(dict.fromkeys([*keys, "ghost"], "model-00001-of-00001.safetensors"))
    assert "no file holds: ghost" in refusal(checkpoint).rule
    index(dict.fromkeys(keys, "model-00002-of-00002.safetensors"))
    assert "model-00002-of-00002.safetensors, which is not there" in refusal(checkpoint).rule
    (checkpoint.parent / "outside.safetensors").write_bytes(b"")
    index(dict.fromkeys(keys, "../outside.safetensors"))
    assert "which is not there" in refusal(checkpoint).rule
    (checkpoint / "model.safetensors.index.json").write_text("{")
    assert "is damaged" in refusal(checkpoint).rule


def test_two_values_for_a_tied_weight_are_refused(checkpoint: Path) -> None:
    assert refusal(checkpoint, config={"tie_word_embeddings": True}).key == "model.config.tie_word_embeddings"
    change(checkpoint, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    check_model(config_of(checkpoint, config={"tie_word_embeddings": True}), 1)


def test_keys_without_the_base_models_prefix_and_old_buffers_are_known(checkpoint: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    change(checkpoint, edit)
    config = config_of(checkpoint)
    check_model(config, 1)
    weights = PretrainedWeights(build_model(build_config(config.model), config.model), str(checkpoint))
    assert {tensor.key for tensor in weights.tensors} == set(LlamaForCausalLM(LlamaConfig(**FIELDS)).state_dict())


def test_a_model_whose_files_need_more_than_new_names_is_refused() -> None:
    model = {"model_type": "olmo_hybrid", "config": {"num_hidden_layers": 4, "vocab_size": 264, "pad_token_id": 0}}
    with pytest.raises(ConfigError) as caught:
        check_model(load({"model": model}), 1)
    assert caught.value.key == "checkpoint.save_consolidated"
    check_model(load({"model": model, "checkpoint": {"save_consolidated": "never"}}), 1)


def test_a_run_that_goes_on_does_not_look_for_its_first_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    config = config_of(checkpoint)
    config.checkpoint.resume = "outputs/run"
    check_model(config, 1)


def test_a_hub_name_is_found_in_the_cache(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    checkpoint.rename(repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = LlamaForCausalLM(LlamaConfig(**FIELDS))
    weights = PretrainedWeights(model, "someone/small")
    weights.load_into(model)
    assert weights.bytes_read == weights.total_bytes
    with pytest.raises(ConfigError, match="it has neither"):
        PretrainedWeights(model, "someone/else")


def test_a_generation_config_of_the_models_own_is_kept_where_it_stops_at_the_tokenizers_token(
    checkpoint: Path, tmp_path: Path
) -> None:
    write = side_files(config_of(checkpoint), "LlamaForCausalLM", byte_tokenizer())
    for stops, kept in (([2, 258], True), (258, True), (2, False)):
        own = json.dumps({"eos_token_id": stops, "temperature": 0.5, "do_sample": True})
        (checkpoint / "generation_config.json").write_text(own)
        folder = tmp_path / str(stops)
        folder.mkdir()
        write(folder)
        written = (folder / "generation_config.json").read_text()
        assert (written == own) == kept
        assert kept or json.loads(written)["eos_token_id"] == 258


def outputs(*sizes: int, dtype: torch.dtype = torch.float32) -> list[OutputTensor]:
    return [OutputTensor(f"t{number}", dtype, (size,)) for number, size in enumerate(sizes)]


def test_files_are_filled_in_order_up_to_their_limit() -> None:
    files = plan_files(outputs(10, 10, 10, 100, 5), max_bytes=80)
    assert [[tensor.key for tensor in file.tensors] for file in files] == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
    assert files[0].name == "model-00001-of-00004.safetensors"
    index = index_of(files)
    assert index is not None
    assert json.loads(index[1])["weight_map"]["t3"] == "model-00003-of-00004.safetensors"
    assert json.loads(index[1])["metadata"]["total_size"] == 540
    assert index_of(plan_files(outputs(1))) is None


def test_the_library_of_safetensors_reads_every_dtype(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.randn(3, 5).to(torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "fp32": torch.randn(7),
        "number": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
    }
    planned = [OutputTensor(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()]
    (file,) = plan_files(planned)
    writer = FileWriter(tmp_path, file)
    for tensor in file.tensors:
        writer.put(tensors[tensor.key])
    writer.close()
    found = load_file(tmp_path / file.name)
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor)
    with safe_open(tmp_path / file.name, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_failed_write_leaves_the_folder_that_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "old").write_text("old")
    files = plan_files(outputs(4, 4))

    def fails(partial: Path) -> None:
        raise OSError(28, "No space left on device", str(partial))

    with pytest.raises(ExportError, match="No space left on device"):
        write_export(files, folder, lambda tensor, writer: torch.zeros(tensor.shape), fails)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (folder / "old").read_text() == "old"
    write_export(files, folder, lambda tensor, writer: torch.zeros(tensor.shape), lambda partial: None)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_writer_that_fails_does_not_block_who_feeds_it(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path / "nowhere", OutputFile("model.safetensors", tuple(outputs(1, 1, 1))))
    for _ in range(3):
        writer.put(torch.zeros(1))
    with pytest.raises(FileNotFoundError):
        writer.close()
