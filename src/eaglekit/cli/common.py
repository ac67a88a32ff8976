"""What the commands share: options, how they talk and fail, and loading what a head is trained for. See `cli`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eaglekit.errors import EaglekitError, InputError

if TYPE_CHECKING:
    from eaglekit.models.hf import HFTarget

Target = Annotated[
    str | None,
    typer.Option(help="Directory, hub id or GGUF file of the target. Default: SmolLM2-135M-Instruct, fetched once."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]


def reporting(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the errors that a user can mend into one line and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except EaglekitError as e:
            fail(str(e))
        except BrokenPipeError:
            # The reader went away (a pager, say): nothing is left to be said, not even at interpreter exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            note("interrupted")
            raise typer.Exit(130) from None
        except OSError as e:
            fail(f"{e.strerror or e}" + (f": {e.filename}" if e.filename else ""))
        except (MemoryError, RuntimeError) as e:
            if isinstance(e, RuntimeError) and type(e).__name__ != "OutOfMemoryError":  # torch's, which is not imported
                raise
            fail("out of memory; use a smaller model, a shorter context, or --dtype bfloat16")

    return run


def fail(message: str) -> None:
    """Say what is wrong in one line, and end with exit code 2."""
    print(f"eaglekit: error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(2)


def note(message: str) -> None:
    """Say something beside the answer."""
    print(f"eaglekit: {message}", file=sys.stderr, flush=True)


def load_for_training(command: str, target: str | None, device: str, dtype: str) -> tuple[str, HFTarget, Any]:
    """Name, stock target and tokenizer of what features are read from."""
    from eaglekit.api import locate
    from eaglekit.models.load import load_hf

    path, _ = locate(target or None)
    loaded, tokenizer = load_hf(path, device=device, dtype=dtype)
    if tokenizer is None:
        raise InputError(f"{command}: {path} has no tokenizer, so text cannot be read; add its tokenizer files")
    # A GGUF file is converted to a folder that is called by a number.
    name = Path(target).stem if target and Path(target).is_file() else Path(str(path)).name
    return name, loaded, tokenizer
