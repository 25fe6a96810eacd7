"""Walks over every model type that has a pipeline plan: two real ranks against the reference run.

python -m tests.parity.pipeline_walk              write docs/pipeline_models.md
python -m tests.parity.pipeline_walk llama phi3   print some of it
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from automodel.config.distributed import PipelineConfig
from automodel.config.errors import ConfigError
from automodel.model.build import build_config, build_model
from automodel.model.pipeline_checks import check_pipeline_model
from tests.parity.cases import Case, run_case
from tests.parity.compare import differences
from tests.parity.ranks import Ranks
from tests.parity.tiny_models import causal_model_types, has_pipeline_plan, tiny_config

TABLE = Path(__file__).resolve().parents[2] / "docs" / "pipeline_models.md"
# Without the kernels of its own library one step of one process takes minutes and gigabytes.
TOO_SLOW = ("kimi_linear",)
HEAD = """# Models in a pipeline

Every causal language model of transformers 5.24 that comes with a pipeline plan, at a tiny size on two pipeline ranks
with 1f1b and two local batches, against one process: loss, gradient norm and every gradient, in fp32. Written by
`python -m tests.parity.pipeline_walk`, checked by `make parity-full`. A model type that is not listed has no plan and
is refused by its class name; `distributed.pipeline.pp_plan` gives it one.

| model type | result |
|---|---|
"""


def walk_case(model_type: str) -> Case:
    return Case(
        model_type=model_type,
        model=tiny_config(model_type),
        distributed={"pp_size": 2},
        settings={"training": {"global_batch_size": 8, "local_batch_size": 4}},
        num_samples=16,
        steps=2,
    )


def examine(model_type: str, ranks: Ranks) -> str:
    """``exact``, why the model is refused or has no result, or ``wrong`` and what differs."""
    if model_type in TOO_SLOW:
        return "not tried: too slow without its kernels"
    case = walk_case(model_type)
    config = case.config(reference=True).model
    try:
        check_pipeline_model(build_model(build_config(config), config), PipelineConfig(), 2)
    except ConfigError as error:
        return f"refused: {error.rule}" if error.key.startswith("distributed") else "not tried: no tiny configuration"
    except Exception as error:
        return f"not tried: no tiny configuration ({type(error).__name__})"
    try:
        reference = run_case(case, 1)
    except Exception as error:
        return f"not tried: one process fails too ({type(error).__name__})"
    try:
        found = differences(ranks.run("tests.parity.cases:run_case", case, 2), reference)
    except RuntimeError:
        return "no result: a rank fails"
    return "exact" if not found else f"wrong: {found[0]}"


def rows(model_types: Iterable[str], ranks: Ranks) -> Iterator[str]:
    for model_type in model_types:
        yield f"| {model_type} | {examine(model_type, ranks)} |"


def planned_types() -> list[str]:
    return [model_type for model_type in causal_model_types() if has_pipeline_plan(model_type)]


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    ranks = Ranks(2)
    try:
        if sys.argv[1:]:
            for row in rows(sys.argv[1:], ranks):
                print(row, flush=True)
        else:
            TABLE.parent.mkdir(exist_ok=True)
            with TABLE.open("w") as table:
                table.write(HEAD)
                for row in rows(planned_types(), ranks):
                    print(row, file=table, flush=True)
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
