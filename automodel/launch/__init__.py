"""Starting the processes of a run, watching them, and ending them together. The launcher imports no torch.

``context`` says where this process is; ``local`` starts ranks from plain python; ``joined`` is a
rank that torchrun or srun started; ``preflight`` refuses what cannot work before either begins.
"""

from automodel.launch.context import LaunchContext, detect
from automodel.launch.errors import RunFailed, Terminated
from automodel.launch.local import run_local
from automodel.launch.program import Program

__all__ = ["LaunchContext", "Program", "RunFailed", "Terminated", "detect", "run_local"]
