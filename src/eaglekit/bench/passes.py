"""What a pass of the target costs: by nodes, by context, and how far it is from what the machine must charge.

Contract: every function gives plain data, times in milliseconds. What is compared is interleaved in random order, anew
in each repetition, so that a machine whose speed drifts slows all alike; numbers are medians with percentiles.
A pass is `forward_tree` alone: nothing is drafted, verified or committed. Tokens are random: costs depend on none.

Glossary: a *floor* is the larger of bytes over the measured bandwidth and operations over the measured rate of float32
products, 2 for a multiply-add. It is one of this machine's memory and float32 arithmetic; weights that fit its caches,
or int8 arithmetic, can be faster than that.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eaglekit.bench.run import spread
from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.models.target import Target, TargetState

NODES = (1, 2, 4, 8, 12, 16, 26, 64)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8000)
FEW, MANY = 1, 12  # nodes: plain decoding, and a tree
CONTEXT = 160  # tokens before the tree where it is nodes that matter
BYTES = {"fp32": 4, "fp16": 2, "int8": 1, "stock": 4}
_WARM_UP = 2  # passes of each kind that are not counted


def shape_of(nodes: int) -> TreeShape:
    """A tree of `nodes`: the first of the paper's tree, and what is more hung below them in the same order."""
    paper = TreeShape.paper().parents
    more = range(len(paper), nodes)
    return TreeShape((*paper[:nodes], *(node - len(paper) + 1 for node in more)))


def random_tree(nodes: int, vocab: int, seed: int = 0) -> DraftTree:
    """Such a tree with random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return DraftTree(torch.randint(vocab, (nodes,), generator=generator), shape_of(nodes))


def filled(target: Target, context: int, room: int) -> TargetState:
    """A state that has read `context` random tokens, with room for `room` nodes behind them."""
    generator = torch.Generator().manual_seed(context)
    state = target.open(1, context + room)
    state.prefill([torch.randint(target.info.vocab_size, (context,), generator=generator)])
    return state


def interleaved(
    states: Mapping[str, TargetState], vocab: int, nodes: Sequence[int], repeats: int, seed: int
) -> dict[str, dict[int, list[float]]]:
    """Milliseconds of `repeats` passes by label of the state and by number of nodes."""
    trees = {n: random_tree(n, vocab, n) for n in nodes}
    for _ in range(_WARM_UP):
        for state in states.values():
            for tree in trees.values():
                state.forward_tree([tree])
    cases = [(label, n) for label in states for n in nodes]
    times: dict[str, dict[int, list[float]]] = {label: {n: [] for n in nodes} for label in states}
    order = random.Random(seed)
    for _ in range(repeats):
        order.shuffle(cases)
        for label, n in cases:
            start = time.perf_counter()
            states[label].forward_tree([trees[n]])
            times[label][n].append(1e3 * (time.perf_counter() - start))
    return times


def cost_by_nodes(
    targets: Mapping[str, Target],
    *,
    nodes: Sequence[int] = NODES,
    context: int = CONTEXT,
    repeats: int = 20,
    seed: int = 0,
) -> dict[str, Any]:
    """Passes over trees of several sizes.

    Returns:
        `context`, `nodes`, and for each label in `passes` a list, one entry per size: `nodes`, `ms`, and `ratio` to the
        one-node pass of its repetition.
    """
    vocab, context = _vocab(targets), min(context, _longest(targets) - max(nodes))
    states = {label: filled(target, context, max(nodes)) for label, target in targets.items()}
    times = interleaved(states, vocab, sorted({1, *nodes}), repeats, seed)
    passes = {
        label: [
            {"nodes": n, "ms": spread(mine[n]), "ratio": spread([a / b for a, b in zip(mine[n], mine[1], strict=True)])}
            for n in nodes
        ]
        for label, mine in times.items()
    }
    return {"context": context, "nodes": list(nodes), "passes": passes}


def cost_by_context(
    targets: Mapping[str, Target],
    *,
    contexts: Sequence[int] = CONTEXTS,
    nodes: Sequence[int] = (FEW, MANY),
    repeats: int = 10,
    seed: int = 0,
) -> dict[str, Any]:
    """Passes behind texts of several lengths, as far as the models' limit allows.

    The longest comes first, and the caches are cut to the next: within a length all passes are interleaved, from one
    length to another the machine may drift.

    Returns:
        `nodes`, `contexts`, and for each label in `passes` a list, one entry per length: `context`, and `ms` by nodes.
    """
    vocab, limit = _vocab(targets), _longest(targets) - max(nodes)
    lengths = sorted(c for c in {*contexts} if c <= limit) or [max(1, limit)]
    states = {label: filled(target, lengths[-1], max(nodes)) for label, target in targets.items()}
    passes: dict[str, list[dict[str, Any]]] = {label: [] for label in targets}
    for length in reversed(lengths):
        for state in states.values():
            state.truncate([length])
        times = interleaved(states, vocab, nodes, repeats, seed)
        for label, mine in times.items():
            passes[label].insert(0, {"context": length, "ms": {str(n): spread(mine[n]) for n in nodes}})
    return {"contexts": lengths, "nodes": list(nodes), "passes": passes}


@dataclass(frozen=True)
class Machine:
    """What the memory and the arithmetic of this machine can do, with the threads in use.

    Attributes:
        read_bytes: Bytes per second that a sum over a large float32 array reads.
        copy_bytes: Bytes per second that a copy of it reads and writes.
        flops: Operations per second of a large float32 matrix product.
    """

    read_bytes: float
    copy_bytes: float
    flops: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second: the better of both."""
        return max(self.read_bytes, self.copy_bytes)


def measure_machine(megabytes: int = 256, size: int = 2048, repeats: int = 7) -> Machine:
    """The best of `repeats`, after one that warms up: an array of `megabytes`, a product of [size, size] matrices."""
    count = megabytes * 2**20 // 4
    x, y = torch.ones(count), torch.empty(count)
    a, b, c = torch.ones(size, size), torch.ones(size, size), torch.empty(size, size)

    def best(call: Any) -> float:
        seconds = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])

    read, copy, product = best(x.sum), best(lambda: y.copy_(x)), best(lambda: torch.mm(a, b, out=c))
    return Machine(4 * count / read, 8 * count / copy, 2 * size**3 / product)


@dataclass(frozen=True)
class Work:
    """What a pass of a model must do.

    Attributes:
        matrix_weights: Numbers in all matrices that every pass reads, the output matrix included.
        cache_numbers: Numbers of keys and values per token of context.
        attention: Multiply-adds of attention per node and token of context.
    """

    matrix_weights: int
    cache_numbers: int
    attention: int

    @staticmethod
    def of(stock: Any) -> Work:
        """Of a transformers model."""
        text = stock.config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv = getattr(text, "num_key_value_heads", None) or heads
        linears = [m for m in stock.modules() if isinstance(m, torch.nn.Linear)]
        layers = text.num_hidden_layers
        return Work(sum(m.weight.numel() for m in linears), 2 * layers * kv * dim, 2 * layers * heads * dim)

    def floor(self, machine: Machine, weights: str, nodes: int, context: int) -> dict[str, Any]:
        """Bytes, multiply-adds, and the milliseconds that they take at least."""
        count = self.matrix_weights * BYTES[weights] + 4 * self.cache_numbers * context
        products = nodes * (self.matrix_weights + self.attention * context)
        by_bytes, by_operations = 1e3 * count / machine.bandwidth, 2e3 * products / machine.flops
        return {
            "bytes": count,
            "multiply_adds": products,
            "ms_by_bytes": round(by_bytes, 4),
            "ms_by_operations": round(by_operations, 4),
            "floor_ms": round(max(by_bytes, by_operations), 4),
            "bound": "bytes" if by_bytes >= by_operations else "operations",
        }


def floors(
    targets: Mapping[str, Target],
    stock: Any,
    *,
    context: int = CONTEXT,
    nodes: Sequence[int] = (FEW, MANY),
    repeats: int = 20,
    seed: int = 0,
    machine: Machine | None = None,
) -> dict[str, Any]:
    """How far passes are from their floors.

    Args:
        targets: By format of the weights.
        stock: The transformers model that they all were made from, whose matrices are counted.
        context: Tokens before the nodes.
        nodes: Sizes of the passes.
        repeats: Passes of each kind.
        seed: Of their order.
        machine: What it can do, or None: it is measured.

    Returns:
        `machine` in GB/s and GFLOP/s, and for each label in `passes` a list, one entry per size: what `Work.floor`
        gives, `ms`, and `over_floor`, the median's ratio to it.
    """
    machine = machine or measure_machine()
    work, cost = Work.of(stock), cost_by_nodes(targets, nodes=nodes, context=context, repeats=repeats, seed=seed)
    passes: dict[str, list[dict[str, Any]]] = {}
    for label, entries in cost["passes"].items():
        passes[label] = []
        for entry in entries:
            floor = work.floor(machine, label, entry["nodes"], cost["context"])
            over = round(entry["ms"]["median"] / floor["floor_ms"], 3) if floor["floor_ms"] else None
            passes[label].append({"nodes": entry["nodes"], "ms": entry["ms"], **floor, "over_floor": over})
    rates = {
        "read_gb_per_second": round(machine.read_bytes / 1e9, 2),
        "copy_gb_per_second": round(machine.copy_bytes / 1e9, 2),
        "float32_gflop_per_second": round(machine.flops / 1e9, 1),
    }
    return {"machine": rates, "context": cost["context"], "passes": passes}


def _vocab(targets: Mapping[str, Target]) -> int:
    return min(target.info.vocab_size for target in targets.values())


def _longest(targets: Mapping[str, Target]) -> int:
    return min(target.info.max_length for target in targets.values())
