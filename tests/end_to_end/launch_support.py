"""Starts launch_train.py as a user would, and looks at what is left of it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "launch_train.py"


def environment(function, **variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "MASTER_", "SLURM_"))}
    return {**kept, "RANK_FUNCTION": function, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), **variables}


def command(folder, *overrides, ranks=2):
    return [
        sys.executable,
        str(SCRIPT),
        "launch.device=cpu",
        f"launch.nproc_per_node={ranks}",
        f"hydra.run.dir={folder}/run",
        *overrides,
    ]


def train(folder, function, *overrides, ranks=2, timeout=60, **variables):
    """Run to the end; the finished process with its output as text."""
    return subprocess.run(
        command(folder, *overrides, ranks=ranks),
        env=environment(function, **variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def start(folder, function, *overrides, ranks=2, **variables):
    """Start and return at once."""
    return subprocess.Popen(
        command(folder, *overrides, ranks=ranks),
        env=environment(function, **variables),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def torchrun(folder, function, *overrides, ranks=2, timeout=90, **variables):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            str(SCRIPT),
            "launch.device=cpu",
            *overrides,
        ],
        env=environment(function, **variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def note(run_dir, rank):
    return json.loads((Path(run_dir) / f"rank_{rank}.json").read_text())


def wait_for_notes(run_dir, ranks, timeout=40):
    """Every rank's note, once all have written one."""
    paths = [Path(run_dir) / f"rank_{rank}.json" for rank in range(ranks)]
    deadline = time.monotonic() + timeout
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "the ranks did not come up"
        time.sleep(0.05)
    return [json.loads(path.read_text()) for path in paths]


def alive(pid):
    """Does the process run (a zombie does not)?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def session_processes(session):
    """Running processes of a session: the launcher's, its fork server's and its ranks'."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(folder.name))
    return found


def wait_until(condition, timeout):
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
