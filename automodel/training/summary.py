"""What a run says in the end, and text made safe to show."""

from __future__ import annotations

import unicodedata
from pathlib import Path


def printable(text: str) -> str:
    """``text`` with everything that could steer a terminal or hide itself written as an escape.

    Line breaks stay, and tabs become four spaces. Control and format characters, surrogates and
    unassigned code points become ``\\x1b`` and the like.
    """
    shown = []
    for character in text.replace("\r\n", "\n").replace("\t", "    "):
        if character != "\n" and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            character = character.encode("unicode_escape").decode("ascii")
        shown.append(character)
    return "".join(shown)


def format_duration(seconds: float) -> str:
    """``1:12``, or ``2:03:04`` from an hour on."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_count(value: float) -> str:
    """``950``, ``9.8k``, ``1.2M``, ``3.4G``: three digits at most."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # The half digit keeps 999.6 from reading "1000".
        if value >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.0f}{letter}" if scaled >= 99.95 else f"{scaled:.1f}{letter}"
    return f"{value:.0f}"


def closing_summary(
    *,
    num_steps: int,
    first_loss: float | None,
    last_loss: float | None,
    val_loss_at_start: float | None,
    val_loss_at_end: float | None,
    generated_text: str | None,
    run_dir: Path,
    seconds: float,
) -> str:
    """The lines that end a run: losses, a sample of generated text, the run folder, the time.

    Losses that were not measured are left out. Generated text is escaped and stands behind a bar, so
    that it cannot pass for a line of the program.

    Args:
        num_steps: steps of this run, by this process.
        first_loss: of its first step.
        last_loss: of its last step.
        val_loss_at_start: before the first step.
        val_loss_at_end: the last one measured.
        generated_text: prompt and continuation, as it came from the model.
        run_dir: shown as given.
        seconds: of the whole run.
    """
    lines = []
    if first_loss is not None and last_loss is not None:
        lines.append(f"loss             {first_loss:.4f} -> {last_loss:.4f} in {num_steps} steps")
    if val_loss_at_end is not None:
        start = f"{val_loss_at_start:.4f} -> " if val_loss_at_start is not None else ""
        lines.append(f"validation loss  {start}{val_loss_at_end:.4f}")
    if generated_text is not None:
        lines.append("generated text")
        lines.extend(f"  | {line}".rstrip() for line in printable(generated_text).split("\n"))
    lines.append(f"run folder       {printable(str(run_dir))}")
    lines.append(f"time             {format_duration(seconds)}")
    return "\n".join(lines)
