"""Train a language model: ``python train.py [group=choice] [key=value] ...``; see README.md."""

import sys
from pathlib import Path

from automodel.cli import main

if __name__ == "__main__":
    sys.exit(main(config_dir=Path(__file__).resolve().parent / "conf"))
