"""Other engines on the same GGUF file, for comparison; none is a dependency.

Written against xllamacpp 2026.10.11549 (llama.cpp; its wheels for Linux are built for any x86-64 machine, without what
`-march=native` would add; build it from source for its best) and openvino-genai 2026.4.1.

Contract: a `Rival` makes exactly as many greedy tokens behind given token ids as it is asked for, past any end of text,
on as many threads as it was made with, and keeps nothing from one prompt to the next. An engine that is not installed
is left out; one that is installed and fails is an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from eaglekit.errors import InputError


class Rival(Protocol):
    """Another engine."""

    name: str
    version: str

    def generate(self, ids: Sequence[int], count: int) -> int:
        """Make `count` tokens behind `ids`.

        Returns:
            How many it made, by its own account.

        Raises:
            InputError: it made none, or said that something is wrong.
        """
        ...


class LlamaCpp:
    """llama.cpp, by xllamacpp, which also listens on a local port that nothing here uses.

    Args:
        gguf: The model.
        threads: For prompt and answer.
        context: Most tokens of a text.
    """

    name = "llama.cpp"

    def __init__(self, gguf: Path, threads: int, context: int) -> None:
        engine: Any = importlib.import_module("xllamacpp")
        self.version = f"xllamacpp {engine.__version__}"
        params = engine.CommonParams()
        params.model.path = str(gguf)
        params.n_ctx, params.n_parallel = context, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.verbosity = 0
        self._server = engine.Server(params)

    def generate(self, ids: Sequence[int], count: int) -> int:
        """See `Rival`."""
        request = {
            "prompt": list(ids),
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": False,
        }
        answer = self._server.handle_completions(request)
        if not isinstance(answer, dict) or "usage" not in answer:
            raise InputError(f"llama.cpp: {str(answer)[:200]}; expected an answer with its usage")
        if answer["usage"]["prompt_tokens"] != len(ids):
            raise InputError(f"llama.cpp read {answer['usage']['prompt_tokens']} prompt tokens, expected {len(ids)}")
        return int(answer["usage"]["completion_tokens"])


class OpenVino:
    """openvino-genai's `LLMPipeline`, which reads a GGUF file itself.

    Args:
        gguf: The model.
        threads: Of inference.
        context: Not used: its caches grow.
    """

    name = "openvino-genai"

    def __init__(self, gguf: Path, threads: int, context: int) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._core: Any = importlib.import_module("openvino")
        self.version = f"openvino-genai {self._genai.__version__.split('-')[0]}"
        self._pipeline = self._genai.LLMPipeline(str(gguf), "CPU", INFERENCE_NUM_THREADS=threads)

    def generate(self, ids: Sequence[int], count: int) -> int:
        """See `Rival`."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = count, False, True
        answer = self._pipeline.generate(self._core.Tensor(np.asarray([list(ids)], dtype=np.int64)), config)
        return len(answer.tokens[0])


RIVALS: dict[str, Callable[[Path, int, int], Rival]] = {"xllamacpp": LlamaCpp, "openvino_genai": OpenVino}
"""By the name of the module that must be there."""


def installed() -> list[str]:
    """Modules of the engines that can be imported."""
    return [name for name in RIVALS if importlib.util.find_spec(name) is not None]


class Apart:
    """A rival in a process of its own: engines that share a process keep each other's threads from the cores.

    Args:
        module: One of `RIVALS`.
        gguf: The model.
        threads: For prompt and answer.
        context: Most tokens of a text.

    Raises:
        InputError: the engine cannot load the file.
    """

    def __init__(self, module: str, gguf: Path, threads: int, context: int) -> None:
        arguments = [module, str(gguf), str(threads), str(context)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eaglekit.bench.rivals", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.name = module
        try:
            told = self._answer()
        except InputError:
            self.close()
            raise
        self.name, self.version = told["name"], told["version"]

    def generate(self, ids: Sequence[int], count: int) -> int:
        """See `Rival`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": list(ids), "count": count}) + "\n")
        self._process.stdin.flush()
        return int(self._answer()["made"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        told: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        if "error" in told:
            raise InputError(f"rivals: {self.name}: {told['error']}")
        return told


def serve(module: str, gguf: Path, threads: int, context: int, requests: TextIO, answers: TextIO) -> None:
    """Be the other side of `Apart`: one JSON line per request and answer; an error ends it."""

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        rival = RIVALS[module](gguf, threads, context)
        say({"name": rival.name, "version": rival.version})
        for line in requests:
            request = json.loads(line)
            say({"made": rival.generate(request["ids"], request["count"])})
    except (InputError, RuntimeError, ValueError, ImportError, AttributeError) as e:
        say({"error": " ".join(str(e).split())[:200]})


@contextmanager
def opened(gguf: Path, threads: int, context: int) -> Iterator[list[Rival]]:
    """All installed engines, loaded, in processes of their own.

    Raises:
        InputError: none is installed, or one cannot load the file.
    """
    names = installed()
    if not names:
        raise InputError("rivals: none is installed; pip install xllamacpp openvino-genai, or leave --rivals out")
    with ExitStack() as stack:
        rivals: list[Rival] = []
        for name in names:
            rival = Apart(name, gguf, threads, context)
            stack.callback(rival.close)
            rivals.append(rival)
        yield rivals


if __name__ == "__main__":
    _, _module, _gguf, _threads, _context = sys.argv
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print must not come between the answers
    serve(_module, Path(_gguf), int(_threads), int(_context), sys.stdin, _answers)
