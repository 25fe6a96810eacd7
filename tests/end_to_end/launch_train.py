"""A train.py whose ranks run a function of launch_ranks.py, chosen by the variable RANK_FUNCTION.

START_DELAYS="0,1.5" delays rank 1 by 1.5 seconds before anything of the product runs.
"""

import os
import sys
import time
from pathlib import Path

from automodel.cli import main
from automodel.launch.program import Program

CONFIG_DIR = Path(__file__).resolve().parents[2] / "conf"

if __name__ == "__main__":
    delays = [float(word) for word in os.environ.get("START_DELAYS", "").split(",") if word]
    if delays:
        time.sleep(delays[int(os.environ["RANK"])])
    program = Program(
        run="launch_ranks:" + os.environ["RANK_FUNCTION"],
        check_model="launch_ranks:" + os.environ.get("MODEL_CHECK", "no_model_check"),
        preload=("torch", "torch.distributed", "launch_ranks"),
    )
    code = main(config_dir=CONFIG_DIR, program=program)
    assert "RANK" in os.environ or "torch" not in sys.modules, "the launcher must stay free of torch"
    sys.exit(code)
