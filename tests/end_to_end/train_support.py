"""Runs the product's own command line, with a model small enough for seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "precision=fp32",
    "launch.device=cpu",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=48",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=4",
    "model.config.head_dim=8",
    "training.seq_length=32",
    "training.max_steps=3",
    "training.generate_tokens=0",
    "data.val_max_samples=8",
    "lr_scheduler.warmup_steps=0",
]
# Plain SGD and ragged labels show what AdamW and whole batches hide.
EXACT = [
    "optimizer=sgd",
    "optimizer.lr=0.5",
    "lr_scheduler=constant",
    "data.mask_labels=0.33",
    "data.log_sample_ids=true",
]


def environment(**variables: str) -> dict[str, str]:
    launch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(launch)}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}


def train(folder: Path, *overrides: str, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python train.py`` in ``folder``, to its end; the run folder is ``folder/run`` unless named."""
    named = any(override.startswith(("hydra.run.dir=", "-m", "--")) for override in overrides)
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *([] if named else [f"hydra.run.dir={folder}/run"]), *overrides],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def metrics(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training lines and validation lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [line for line in lines if "val_loss" in line]
