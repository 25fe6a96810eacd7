"""Peak memory and CPU time of the losses at a vocabulary of 128k.

    python benchmarks/loss_memory.py                            about half a minute on two quiet cores
    python benchmarks/loss_memory.py --tokens 4096 --hidden 1024

Each row is one forward and backward of the loss alone, from hidden states ``[tokens, hidden]`` and the head
``[vocab, hidden]``, in a process of its own. The peak is what it takes above inputs, head and their gradients, as
resident memory on a CPU and as allocated memory on CUDA. Ratios are to plain cross entropy in the same dtype.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F

from automodel.model import linear_cross_entropy as module
from automodel.model.linear_cross_entropy import linear_cross_entropy_sum
from automodel.training.loss import cross_entropy_sum
from automodel.training.metrics import peak_memory_bytes

# name, dtype, whether torch's own chunked function may be used where it exists
ROWS = (
    ("cross_entropy", torch.float32, True),
    ("linear_cross_entropy", torch.float32, True),
    ("linear_cross_entropy, without torch's own", torch.float32, False),
    ("cross_entropy", torch.bfloat16, True),
    ("linear_cross_entropy", torch.bfloat16, True),
)


def measure(row: int, tokens: int, hidden_size: int, vocab_size: int) -> tuple[float, float, float]:
    """Peak in MiB, CPU seconds (wall seconds on CUDA) and the mean loss of a row."""
    name, dtype, with_torch = ROWS[row]
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device=device_type).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocab_size, hidden_size, device=device_type)).to(dtype).requires_grad_()
    labels = torch.randint(vocab_size, (tokens,), device=device_type)
    # Written, so that their pages count before the measurement.
    hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)
    if device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    before, clock = peak_memory_bytes(device_type), time.perf_counter if device_type == "cuda" else time.process_time
    started = clock()
    if name == "cross_entropy":
        loss = cross_entropy_sum(F.linear(hidden, weight).unsqueeze(0), labels.unsqueeze(0))
    elif with_torch:
        loss = linear_cross_entropy_sum(hidden, weight, labels)
    else:
        with mock.patch.object(module, "_torch_has_it_for", return_value=False):
            loss = linear_cross_entropy_sum(hidden, weight, labels)
    (loss / tokens).backward()
    if device_type == "cuda":
        torch.cuda.synchronize()
    seconds = clock() - started
    return (peak_memory_bytes(device_type) - before) / 2**20, seconds, loss.item() / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)), help="of the table, from 0")
    arguments = parser.parse_args()
    sizes = f"{arguments.tokens} tokens, hidden {arguments.hidden}, vocabulary {arguments.vocab:,}"
    print(f"torch {torch.__version__}, {sizes}")
    print(f"{'loss':42} {'dtype':9} {'peak MiB':>9} {'ratio':>6} {'seconds':>8} {'ratio':>6} {'mean loss':>10}")
    plain: dict[torch.dtype, tuple[float, float]] = {}
    for row in arguments.rows:
        name, dtype, _ = ROWS[row]
        # A process that has done nothing else: the peak of a process never falls.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak, seconds, loss = pool.apply(measure, (row, arguments.tokens, arguments.hidden, arguments.vocab))
        base = plain.setdefault(dtype, (peak, seconds))
        print(
            f"{name:42} {str(dtype).removeprefix('torch.'):9} {peak:9.0f} {peak / base[0]:6.2f} {seconds:8.1f} "
            f"{seconds / base[1]:6.2f} {loss:10.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
