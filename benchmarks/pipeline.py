"""Pipeline parallelism: tokens per CPU-second against a bare loop, and the bubble of each schedule.

    python -m benchmarks.pipeline             both, about three minutes on two cores
    python -m benchmarks.pipeline speed
    python -m benchmarks.pipeline bubble

Speed: a Llama of 8.4 million parameters, 8 sequences of 512 tokens a step, AdamW, clipping at 1, fp32. The bare loop is
the Hugging Face model in one process; ``pp2`` is this project's trainer on two ranks with 1f1b. They take turns, and
the ratio is that of the best turns: CPU time does not count waiting, but caches and clocks are shared.

Bubble: four ranks run each schedule once and note every computation. Idle slots are then counted with a forward, and
each half of a backward, as one slot; seconds on shared cores would say little.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist

from automodel.config.schema import load
from automodel.data import DataBundle, EpochSampler, TokenDataset, TrainLoader, byte_tokenizer
from automodel.distributed.pipeline_parallel import AutoPipeline
from automodel.distributed.pipeline_stage import Stage
from automodel.distributed.setup import setup_distributed
from automodel.model.build import build_config, build_model
from automodel.model.infrastructure import apply_model_infrastructure, instantiate_infrastructure
from automodel.training.lr_scheduler import build_lr_scheduler
from automodel.training.optimizer import build_optimizer
from automodel.training.run import mixed_precision
from automodel.training.trainer import Trainer, TrainingObserver

SEQ, ROWS, STEPS, TURNS = 512, 8, 3, 3
MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": SEQ,
    "tie_word_embeddings": False,
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "v_schedule", "dualpipe_v")
Trace = list[tuple[int, str, int]]


def settings(model: dict[str, Any], distributed: dict[str, Any], seq_length: int, steps: int) -> Any:
    return load(
        {
            "model": {"model_type": "llama", "config": model, "init": "random"},
            "distributed": distributed,
            "precision": dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), "float32"),
            "lr_scheduler": {"name": "constant"},
            "training": {
                "max_steps": steps,
                "global_batch_size": ROWS,
                "local_batch_size": ROWS,
                "seq_length": seq_length,
                "val_at_end": False,
            },
        }
    )


def make_trainer(config: Any, world_size: int) -> Trainer:
    mesh_context = setup_distributed(config.distributed, world_size, "cpu")
    infrastructure = instantiate_infrastructure(mesh_context, mixed_precision(config.precision))
    trained = apply_model_infrastructure(build_model(build_config(config.model), config.model), infrastructure)
    optimizer = build_optimizer(trained, config.optimizer)
    seq_length, rows = config.training.seq_length, config.training.local_batch_size
    tokens = torch.arange((rows * 4) * seq_length + 1).mul(7919).remainder(MODEL["vocab_size"] // 32).numpy()
    dataset = TokenDataset(tokens, seq_length, 0.0, 0)
    return Trainer(
        config=config,
        mesh_context=mesh_context,
        model=trained,
        manager=infrastructure.manager,
        optimizer=optimizer,
        lr_scheduler=build_lr_scheduler(optimizer, config.lr_scheduler, config.training.max_steps),
        data=DataBundle(byte_tokenizer(), dataset, None, int(tokens.max())),
        loader=TrainLoader(dataset, EpochSampler(len(dataset), 0), config.training.global_batch_size, rows, 0, 1),
        total_steps=config.training.max_steps,
        observer=TrainingObserver(),
        stop_requested=lambda: False,
    )


def pipeline_turns(rank: int, connection: Connection) -> None:
    """CPU seconds of this rank for each turn of ``STEPS`` steps, the first of which warms up."""
    distributed = {"pp_size": 2, "pipeline": {"pp_microbatch_size": 2}}
    trainer = make_trainer(settings(MODEL, distributed, SEQ, 1), 2)
    trainer.train()
    while connection.recv():
        trainer.total_steps += STEPS
        started = time.process_time()
        trainer.train()
        connection.send(time.process_time() - started)


def bare_turns(rank: int, connection: Connection) -> None:
    """The same work in a loop with nothing of this project in it but the model's size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    batch = torch.randint(0, 128, (ROWS, SEQ + 1))

    def step() -> None:
        for rows in batch.split(2):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            (loss * len(rows) / ROWS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    while connection.recv():
        started = time.process_time()
        for _ in range(STEPS):
            step()
        connection.send(time.process_time() - started)


def traces(rank: int, connection: Connection) -> None:
    """What this rank computes in one local batch of each schedule: stage, kind, micro-batch."""
    model = {**MODEL, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "head_dim": 8}
    found: dict[str, Trace] = {}
    for schedule in SCHEDULES:
        config = settings(model, {"pp_size": 4, "pipeline": {"pp_schedule": schedule}}, 8, 1)
        trainer = make_trainer(config, 4)
        assert isinstance(trainer.model, AutoPipeline)
        found[schedule] = []
        for stage in trainer.model._stages:
            _note(stage, found[schedule])
        trainer.train()
    connection.send(found)
    connection.recv()


def _note(stage: Stage, trace: Trace) -> None:
    forward, backward, weight = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk

    def noted_forward(index: int, *args: Any, **kwargs: Any) -> Any:
        trace.append((stage.stage_index, "F", index))
        return forward(index, *args, **kwargs)

    def noted_backward(index: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> Any:
        trace.append((stage.stage_index, "B" if full_backward else "I", index))
        return backward(index, loss=loss, full_backward=full_backward, last_backward=last_backward)

    def noted_weight(index: int, *args: Any, **kwargs: Any) -> Any:
        trace.append((stage.stage_index, "W", index))
        return weight(index, *args, **kwargs)

    stage.forward_one_chunk = noted_forward  # type: ignore[assignment, method-assign]
    stage.backward_one_chunk = noted_backward  # type: ignore[assignment, method-assign]
    stage.backward_weight_one_chunk = noted_weight  # type: ignore[assignment, method-assign]


def idle_share(ranks: list[Trace]) -> float:
    """Share of slots in which a rank waits, over all ranks, from the first slot to the last.

    A computation begins when its rank is free and what it needs is there: a forward the one of the stage before, a
    backward the forward of its own stage and the backward of the stage behind.
    """
    last_stage = max(stage for trace in ranks for stage, _, _ in trace)
    done: dict[tuple[int, str, int], int] = {}
    clocks, places, busy = [0] * len(ranks), [0] * len(ranks), 0
    while any(place < len(trace) for place, trace in zip(places, ranks, strict=True)):
        moved = False
        for rank, trace in enumerate(ranks):
            while places[rank] < len(trace):
                stage, kind, index = trace[places[rank]]
                needs = {
                    "F": [(stage - 1, "F", index)] if stage else [],
                    "W": [(stage, "I", index)],
                }.get(kind, [(stage, "F", index), *([(stage + 1, "I", index)] if stage < last_stage else [])])
                if any(need not in done for need in needs):
                    break
                slots = 2 if kind == "B" else 1
                end = max([clocks[rank], *(done[need] for need in needs)]) + slots
                # The input's gradient is what the stage before waits for, in a whole backward at its end.
                done[stage, "I" if kind == "B" else kind, index] = end
                clocks[rank], busy, moved = end, busy + slots, True
                places[rank] += 1
        assert moved, "a schedule that waits for itself"
    return 1 - busy / (max(clocks) * len(ranks))


def theory(schedule: str, pp_size: int, microbatches: int) -> str:
    """The known share of idle slots, where there is one; schedules that split backward aim at none."""
    stages = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "looped_bfs": 2}.get(schedule)
    return "towards 0" if stages is None else f"{(pp_size - 1) / (stages * microbatches + pp_size - 1):.3f}"


def _rank(function: Callable[[int, Connection], None], rank: int, world: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    function(rank, pipe)
    os._exit(0)


def start(function: Callable[[int, Connection], None], world: int) -> list[Connection]:
    """Processes that answer each ``True`` with a result; they end with ``False``."""
    context = multiprocessing.get_context("fork")
    store = os.path.join(tempfile.mkdtemp(), "store")
    pipes = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        context.Process(target=_rank, args=(function, rank, world, store, theirs), daemon=True).start()
        pipes.append(ours)
    return pipes


def speed() -> None:
    groups = {"bare": start(bare_turns, 1), "pp2": start(pipeline_turns, 2)}
    best: dict[str, float] = {}
    for _ in range(TURNS):
        for name, pipes in groups.items():
            for pipe in pipes:
                pipe.send(True)
            seconds = sum(pipe.recv() for pipe in pipes)
            best[name] = max(best.get(name, 0.0), ROWS * SEQ * STEPS / seconds)
    for pipes in groups.values():
        for pipe in pipes:
            pipe.send(False)
    print(f"bare loop, one process  {best['bare']:7.0f} tokens per CPU-second")
    print(f"pp2, 1f1b               {best['pp2']:7.0f} tokens per CPU-second")
    print(f"ratio                   {best['pp2'] / best['bare']:7.3f}   (aim: 0.96)")


def bubble() -> None:
    pipes = start(traces, 4)
    ranks = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(False)
    print(f"idle share of slots on 4 ranks with {ROWS} micro-batches")
    for schedule in SCHEDULES:
        share = idle_share([found[schedule] for found in ranks])
        print(f"{schedule:<18} {share:.3f}   theory {theory(schedule, 4, ROWS)}")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    wanted = sys.argv[1:] or ["bubble", "speed"]
    for name in wanted:
        {"bubble": bubble, "speed": speed}[name]()
