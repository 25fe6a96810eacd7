"""From a folder of transformers into a run and back out, each in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.end_to_end.train_support import EXACT, ROOT, environment, metrics, train

RUN = [
    "precision=fp32",
    "launch.device=cpu",
    "training.seq_length=32",
    "training.max_steps=2",
    "training.generate_tokens=0",
    "data.val_max_samples=8",
    "lr_scheduler.warmup_steps=0",
    *EXACT,
]
# Loads a folder as anybody would, and says what it found.
LOADER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = torch.tensor([tokenizer("def main():")["input_ids"]])
logits = model(input_ids=ids).logits
text = model.generate(ids, max_new_tokens=3, do_sample=False)
print(json.dumps({
    "problems": [sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")],
    "ids": ids[0].tolist(), "logits": logits[0, -1].tolist(),
    "dtype": str(model.dtype), "cache": model.config.use_cache,
    "tied": model.lm_head.weight is model.model.embed_tokens.weight, "length": text.shape[1],
    "eos": GenerationConfig.from_pretrained(sys.argv[1]).eos_token_id,
}))
"""


def loaded(folder: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", LOADER, folder], env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, with five layers, in several files, in bf16."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=267,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process."""
    folder = tmp_path_factory.mktemp("alone")
    done = train(folder, "model=hf", f"model.pretrained_model_name_or_path={checkpoint}", *RUN, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_a_run_begins_with_the_weights_of_the_folder(checkpoint: Path, alone: Path) -> None:
    steps, _ = metrics(alone)
    initial = torch.log(torch.tensor(267.0)).item()
    assert steps[0]["loss"] != pytest.approx(initial, abs=0.01), "these are not the weights of a fresh model"
    log = (alone / "train.log").read_text()
    total = sum(tensor.numel() * 2 for path in checkpoint.glob("*.safetensors") for tensor in load_file(path).values())
    assert f"read {total:,} of {total:,} bytes" in log


@pytest.mark.parametrize(
    "layout",
    [
        ["distributed.dp_size=2", "checkpoint.save_consolidated=every", "training.ckpt_every_steps=1"],
        ["distributed=fsdp2_pp2", "training.local_batch_size=8"],
    ],
    ids=["dp2", "pp2"],
)
def test_what_a_layout_exports_a_fresh_process_loads(
    layout: list[str], checkpoint: Path, alone: Path, tmp_path: Path
) -> None:
    done = train(tmp_path, "model=hf", f"model.pretrained_model_name_or_path={checkpoint}", *RUN, *layout, timeout=300)
    assert done.returncode == 0, done.stderr
    ours, theirs = metrics(tmp_path / "run")[0], metrics(alone)[0]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], abs=1e-5)
    found, expected = loaded(tmp_path / "run" / "hf"), loaded(alone / "hf")
    assert found["problems"] == [[], [], []]
    assert found["logits"] == pytest.approx(expected["logits"], abs=1e-5)
    assert found["tied"]
    assert found["dtype"] == "torch.float32"
    assert found["cache"] is True
    assert found["ids"] == list(b"def main():")
    assert found["eos"] == 258
    before = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    untrained = before(input_ids=torch.tensor([found["ids"]])).logits[0, -1].tolist()
    assert found["logits"] != pytest.approx(untrained, abs=1e-3), "training changed nothing"
    saved = [path.relative_to(tmp_path / "run") for path in (tmp_path / "run").rglob("model.safetensors")]
    wanted = ["hf"] if "fsdp2_pp2" in layout[0] else ["checkpoints/step_1/hf", "checkpoints/step_2/hf", "hf"]
    assert sorted(str(path.parent) for path in saved) == wanted


def test_a_checkpoint_is_exported_later_to_the_same_bytes(alone: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "automodel.export", alone / "checkpoints" / "step_2"]
    done = subprocess.run(
        [*command, tmp_path / "hf"], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == {
        path.name: path.read_bytes() for path in (alone / "hf").iterdir()
    }
    refused = subprocess.run(
        [*command, tmp_path / "hf"], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert refused.returncode == 2
    assert "it exists already" in refused.stderr


def test_weights_that_do_not_fit_are_refused_before_anything_starts(checkpoint: Path, tmp_path: Path) -> None:
    done = train(
        tmp_path, "model=hf", f"model.pretrained_model_name_or_path={checkpoint}", "model.config.num_hidden_layers=4"
    )
    assert done.returncode == 2
    assert "unexpected (9): model.layers.4." in done.stderr
    assert not (tmp_path / "run").exists()
