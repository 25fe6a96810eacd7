"""The settings answer without torch: `--help`, `--cfg job` and refusals must not wait for its import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import automodel.config

ROOT = Path(automodel.config.__file__).parents[2]
MODULES = sorted(f"automodel.config.{path.stem}" for path in Path(automodel.config.__file__).parent.glob("[a-z]*.py"))

PROGRAM = """
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
sys.path.insert(0, "tests/unit")
from composing import CONF, compose_config, refusal
from automodel.config.help import help_text
help_text(CONF)
assert refusal(compose_config("distributed=hsdp")) is None
assert refusal(compose_config("distributed.tp_size=3")) is not None
loaded = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
sys.exit(f"loaded: {{loaded}}" if loaded else 0)
"""


def test_no_module_of_the_config_loads_torch_or_transformers() -> None:
    assert "automodel.config.validate" in MODULES
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(modules=MODULES)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
