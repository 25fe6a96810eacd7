"""Tensor and sequence parallelism of this product against a bare PyTorch loop on the same model.

    python -m benchmarks.tensor_parallel [--seconds 200]

The same model, turns and table as ``benchmarks.data_parallel``. Where the rest of a ratio goes: each tp rank computes
norms, residual sums, rotary tables and the cross entropy of all tokens (under sequence parallelism only the last); each
layer adds up hidden states four times, two in forward and two in backward, and on a CPU gloo's sums are computed by the
same cores; products of half the width are less efficient.
"""

from __future__ import annotations

import argparse

from benchmarks.data_parallel import Variant, measure

VARIANTS = (
    Variant("two bare loops", 2, None),
    Variant("TP 2", 2, {"tp_size": 2}),
    Variant("TP 2, sequence parallel", 2, {"tp_size": 2, "sequence_parallel": True}),
    Variant("FSDP2 x TP, 2 x 2", 4, {"tp_size": 2, "dp_size": 2}),
    Variant("the same, gather_once_per_step=true", 4, {"tp_size": 2, "dp_size": 2, "gather_once_per_step": True}),
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200.0, help="how long the rounds go on")
    measure(VARIANTS, parser.parse_args().seconds)
