"""The linear start: it finds what is linear in what the head reads, for every variant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eaglekit.models.head import EagleHead, HeadConfig
from eaglekit.train.features.store import StoredDialogue
from eaglekit.train.head.start import linear_start

HIDDEN, EMBEDDING, VOCAB = 8, 6, 40
SIZES = torch.tensor([1500.0, *[1.0] * (HIDDEN - 1)])  # of a stream: real ones too have a few such places


def build(**changes: Any) -> EagleHead:
    values = {
        "hidden_size": HIDDEN, "embedding_size": EMBEDDING, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 4, "intermediate_size": 16, "vocab_size": VOCAB,
    }  # fmt: skip
    head = EagleHead(HeadConfig(**{**values, **changes}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            if name == "fuse.weight":
                count = parameter.shape[1]
                parameter.copy_(torch.eye(count)[:: count // HIDDEN] * 1.5)  # of every stream something
    return head


class Source:
    """Texts whose next feature is a linear function of what `head` reads.

    Attributes:
        pairs: What `fc` reads and what it is to give, position by position, of all answers.
    """

    def __init__(self, head: EagleHead) -> None:
        g = torch.Generator().manual_seed(3)
        self.embedding = torch.randn(VOCAB, EMBEDDING, generator=g) * 0.3
        self.dialogues: list[StoredDialogue] = []
        self.width = HIDDEN * (1 + len(head.config.feature_layers))
        self._read: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self.pairs: list[tuple[Tensor, Tensor]] = []
        layers = head.config.feature_layers
        matrix = torch.randn(HIDDEN, head.config.fc_width, generator=g)
        if head.config.reads_features:  # turned, so that features neither grow nor die out
            matrix[:, -HIDDEN:] = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=g)).Q
        if head.fuse is not None and not head.config.input_norm:
            matrix[:, -HIDDEN:] /= head.fuse.weight.detach() @ SIZES.repeat(len(layers))
        bias = torch.randn(HIDDEN, generator=g) * head.config.fc_bias
        for number, first in enumerate((1, 1, 5, 12, 1, 3)):
            length = 60 + number
            ids = torch.randint(VOCAB, (length,), generator=g)
            streams = torch.randn(length - 1, HIDDEN * len(layers), generator=g) * SIZES.repeat(len(layers))
            features = [torch.randn(HIDDEN, generator=g)]
            for j in range(length - 2):
                # The definition, position by position: the token ahead, or the feature's own with none for the first.
                token = self.embedding[ids[j + 1]]
                if head.config.inputs == "feature+token":
                    token = self.embedding[ids[j]] if j else torch.zeros(EMBEDDING)
                read = head.fc_input(token, streams[j] if layers else features[j]).detach()
                features.append(matrix @ read + bias)
                if j >= first - 1:
                    self.pairs.append((read, features[-1]))
            self._tokens.append(ids)
            self._read.append(torch.cat((torch.stack(features), streams), -1))
            self.dialogues.append(StoredDialogue(number, length, ((first, length),), True))

    def tokens(self, row: StoredDialogue) -> Tensor:
        """int64 [n]."""
        return self._tokens[row.number]

    def read(self, rows: Sequence[StoredDialogue]) -> list[Tensor]:
        """[n - 1, W] each; what stands before the answers must not be used."""
        found = []
        for row in rows:
            features = self._read[row.number].clone()
            features[: row.spans[0][0] - 1] = torch.nan
            found.append(features)
        return found

    @torch.no_grad()
    def error(self, head: EagleHead) -> float:
        """Mean absolute error of what `fc` gives."""
        return sum(float((head.fc(read) - wanted).abs().mean()) for read, wanted in self.pairs) / len(self.pairs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"inputs": "feature+token"}, {"inputs": "feature"}, {"inputs": "token"}, {"mlp": False},
        {"input_norm": True}, {"inputs": "feature+token", "input_norm": True}, {"feature_layers": (0, 3)},
        {"feature_layers": (0, 1, 2), "inputs": "feature+token"}, {"feature_layers": (1, 2), "input_norm": True},
    ],
    ids=str,
)  # fmt: skip
def test_it_finds_what_is_linear(changes: dict[str, Any], bias: bool) -> None:
    head = build(fc_bias=bias, **changes)
    source = Source(head)
    before = {n: p.clone() for n, p in head.named_parameters() if not n.startswith("fc.")}
    assert source.error(head) > 0.3
    linear_start(head, source, source.dialogues, source.embedding, seed=0, ridge=1e-6)
    assert source.error(head) < 0.01
    assert all(torch.equal(p, before[n]) for n, p in head.named_parameters() if n in before)


def test_the_size_of_streams_does_not_drown_the_embeddings() -> None:
    """With one penalty for all inputs, those that are small beside the streams would be left out."""
    head = build(feature_layers=(0, 3))
    source = Source(head)
    linear_start(head, source, source.dialogues, source.embedding, seed=0)
    assert source.error(head) < 0.01
