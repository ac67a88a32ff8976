"""The library's front door: `load` a target and its head, then `generate`, `stream` or `chat`."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from eaglekit.core.random import GeneratorSource
from eaglekit.core.sampling import Law, Processor, SamplingParams
from eaglekit.core.stats import Stats
from eaglekit.core.tree import TreeShape
from eaglekit.drafters.auto import AutoDrafter, Clockwork, default_arms
from eaglekit.drafters.eagle import EagleDrafter
from eaglekit.drafters.prompt_lookup import GraftedDrafter
from eaglekit.engine.decode import Session, check_prompt
from eaglekit.engine.drafter import Drafter, PlainDrafter
from eaglekit.engine.stopping import FinishReason, Piece, Stopper
from eaglekit.errors import HeadError, InputError
from eaglekit.models.checkpoint import check_fit
from eaglekit.models.defaults import GenerationDefaults
from eaglekit.models.draft import DraftModel
from eaglekit.models.head import EagleHead
from eaglekit.models.target import Target

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int]
Method = Literal["auto", "eagle", "lookup", "plain"]


@dataclass(frozen=True)
class Generation:
    """An answer.

    Attributes:
        text: Without special tokens, cut before a stop string.
        token_ids: The new tokens; an end-of-text id that ended the answer is the last of them.
        finish_reason: "stop" (end of text or stop string), "length", or "closed" (the stream was closed early).
        prompt_tokens: Length of the prompt, tokens.
        stats: What decoding did.
        logprobs: For each new token the target's own log-probability, before any processor or temperature, if asked
            for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    stats: Stats
    logprobs: list[float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same, for JSON."""
        out: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_dict(),
        }
        if self.logprobs is not None:
            out["logprobs"] = self.logprobs
        return out


class Stream(Iterator[Piece]):
    """An answer while it is made: iterate for its pieces; `result` gives the whole of what was read."""

    def __init__(self, pieces: Iterator[Piece], stopper: Stopper, stats: Stats, prompt_tokens: int) -> None:
        self._pieces = pieces
        self._stopper = stopper
        self._seen: list[Piece] = []
        self.stats = stats
        self.prompt_tokens = prompt_tokens

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        piece = next(self._pieces)
        self._seen.append(piece)
        return piece

    def close(self) -> None:
        """Stop here; nothing more is computed."""
        close = getattr(self._pieces, "close", None)
        if close is not None:
            close()

    def result(self) -> Generation:
        """Read to the end, and give the whole answer."""
        for _ in self:
            pass
        logprobs = [p.logprobs for p in self._seen]
        return Generation(
            text="".join(p.text for p in self._seen),
            token_ids=[t for p in self._seen for t in p.token_ids],
            finish_reason=self._stopper.finish_reason or "closed",
            prompt_tokens=self.prompt_tokens,
            stats=self.stats,
            logprobs=[x for lp in logprobs for x in lp or ()] if any(lp is not None for lp in logprobs) else None,
        )


@dataclass(frozen=True)
class _Plan:
    """A request that was checked and can be carried out."""

    ids: list[int]
    law: Law
    source: GeneratorSource
    stopper: Stopper
    logprobs: bool

    def run(self, session: Session) -> Stream:
        stats = Stats()
        pieces = session.generate(
            self.ids,
            law=self.law,
            source=self.source,
            stopper=self.stopper,
            stats=stats,
            logprobs=self.logprobs,
        )
        return Stream(pieces, self.stopper, stats, len(self.ids))


@dataclass
class Model:
    """A target with its tokenizer and, for EAGLE, its draft head.

    Attributes:
        target: The frozen decoder.
        tokenizer: Of transformers; None for models without one, which then take and give token ids only.
        head: The draft head; None leaves lookup and plain decoding.
        defaults: What the model's generation_config asks for.
    """

    target: Target
    tokenizer: Any = None
    head: EagleHead | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    _drafting: DraftModel | None = field(default=None, init=False, repr=False)
    _clockwork: Clockwork | None = field(default=None, init=False, repr=False)

    @staticmethod
    def wrap(target: Any, tokenizer: Any = None, head: EagleHead | None = None) -> Model:
        """A model from what is in memory already.

        Args:
            target: A causal language model of transformers, which is put in eval mode, or an `HFTarget` or
                `FastTarget`.
            tokenizer: Of transformers.
            head: On the target's device.

        Raises:
            UnsupportedModelError: the family cannot read trees exactly.
        """
        from eaglekit.models.fast import FastTarget

        if not isinstance(target, FastTarget):
            from eaglekit.models.hf import HFTarget

            target = target if isinstance(target, HFTarget) else HFTarget(target)
        return Model(target, tokenizer, head, target.defaults(tokenizer))

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Answer `prompt`.

        Args:
            prompt: A user's message (the chat template is applied if there is one), a list of messages with "role" and
                "content", or token ids, which are taken as they are.
            **options: See `stream`.

        Returns:
            The answer; its ids are those of plain decoding (temperature 0), or follow the same law (above 0).

        Raises:
            InputError: the request cannot be carried out; nothing was computed.
            HeadError: method "eagle" without a head.
        """
        return self.stream(prompt, **options).result()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        tree: str | TreeShape | None = None,
        method: Method = "auto",
        logits_processor: Sequence[Processor] = (),
        logprobs: bool = False,
        chat_template: bool = True,
    ) -> Stream:
        """Answer `prompt` piece by piece, as tokens are accepted.

        Args:
            prompt: As for `generate`.
            max_new_tokens: Limit of the answer, tokens.
            temperature: 0 is greedy.
            top_p: Default: the model's generation_config, else 1 (off).
            top_k: Default: the model's generation_config, else 0 (off).
            min_p: Default: the model's generation_config, else 0 (off).
            repetition_penalty: Default: the model's generation_config, else 1 (off).
            stop: Strings that end the answer; they are not part of its text.
            seed: Makes the answer repeatable; the global random state is never used.
            tree: "paper", "chain:N", a JSON file of choices, or a `TreeShape`; "+lookup:N" behind it grafts up to N
                tokens that the text itself suggests. Default: for method "auto" what pays best, found while decoding;
                for "eagle" the paper's.
            method: "auto" (EAGLE and lookup as far as they pay, lookup alone without a head), "eagle", "lookup" (tokens
                that the text itself suggests), or "plain" for one token per pass.
            logits_processor: Callables like the `LogitsProcessor` of transformers. Each tree node is given its own
                prefix, drafts included, so they must be functions of their arguments alone.
            logprobs: Whether to return log-probabilities.
            chat_template: Whether a prompt that is one string is a user's message; False takes it as raw text.
        """
        plan = self._plan(
            self.encode(prompt, chat_template=chat_template),
            max_new_tokens=max_new_tokens,
            sampling=_sampling(self.defaults.sampling, temperature, top_p, top_k, min_p, repetition_penalty),
            stop=stop,
            seed=seed,
            logits_processor=logits_processor,
            logprobs=logprobs,
        )
        drafter = self.drafter(method, tree)
        session = Session(self.target, drafter, len(plan.ids) + max_new_tokens)
        if max_new_tokens:
            check_prompt(plan.ids, max_new_tokens, self.target.info.max_length, self.target)
        return plan.run(session)

    def chat(self, *, system: str | None = None, tree: str | TreeShape | None = None, method: Method = "auto") -> Chat:
        """A conversation whose caches are kept from turn to turn."""
        return Chat(self, Session(self.target, self.drafter(method, tree), self.target.info.max_length), system)

    def drafter(self, method: Method, tree: str | TreeShape | None) -> Drafter:
        """The drafter for a method and a tree.

        Raises:
            InputError: an unknown method, a bad tree, or one that the method cannot use.
            HeadError: method "eagle", or a tree of its, without a head.
        """
        shape, lookup = check_method(method, tree)
        if method == "plain":
            return PlainDrafter()
        if method == "lookup" or (method == "auto" and self.head is None and (tree is None or _only_lookup(shape))):
            return GraftedDrafter(PlainDrafter(), lookup or 8)
        if self.head is None:
            raise HeadError(
                f"method 'eagle' needs a draft head, and none was given for {self.target.info.name}; "
                "pass head=DIR (--head DIR), train one with 'eaglekit train', or use method='plain' (--method plain)"
            )
        check_fit(self.head.config, self.target.info)
        if self._drafting is None or self._drafting.head is not self.head:
            self._drafting, self._clockwork = DraftModel(self.head, self.target), None
        if method == "eagle" or tree is not None:
            eagle = EagleDrafter(self.head, self.target, shape, model=self._drafting)
            return GraftedDrafter(eagle, lookup) if lookup else eagle
        if self._clockwork is None:
            self._clockwork = Clockwork(default_arms())
        middle = EagleDrafter(self.head, self.target, TreeShape.chain(2), model=self._drafting)
        return AutoDrafter(middle, self._clockwork)

    def encode(self, prompt: Prompt, *, chat_template: bool = True) -> list[int]:
        """Token ids of a prompt, as `generate` reads it.

        Raises:
            InputError: the prompt is of no known kind, or needs a tokenizer or a chat template that is not there.
        """
        if isinstance(prompt, torch.Tensor):
            if prompt.dtype.is_floating_point or prompt.numel() != max(prompt.shape, default=0):
                raise InputError(
                    f"prompt: a {prompt.dtype} tensor of shape {tuple(prompt.shape)}; "
                    "expected whole numbers, [n] or [1, n]"
                )
            return [int(i) for i in prompt.flatten().tolist()]
        if isinstance(prompt, str):
            _check_text(prompt)
            if self.tokenizer is None:
                raise InputError("prompt: this target has no tokenizer; give token ids")
            if chat_template and self.tokenizer.chat_template:
                return self._apply_template([{"role": "user", "content": prompt}])
            return list(self.tokenizer(prompt)["input_ids"])
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
            raise InputError(
                f"prompt: got {type(prompt).__name__}; expected a string, a list of messages, or a list of token ids"
            )
        items = list(prompt)
        if items and all(isinstance(i, Integral) and not isinstance(i, bool) for i in items):
            return [int(i) for i in items]  # type: ignore[call-overload]
        if not items:
            raise InputError("prompt: it is empty; give a string, messages or token ids")
        for number, message in enumerate(items):
            if (
                not isinstance(message, Mapping)
                or not isinstance(message.get("role"), str)
                or not isinstance(message.get("content"), str)
            ):
                raise InputError(
                    f"prompt: message {number} is {message!r}; expected a dict with strings 'role' and 'content'"
                )
            _check_text(message["role"] + message["content"])
        return self._apply_template([dict(m) for m in items if isinstance(m, Mapping)])

    @staticmethod
    def check_options(
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> None:
        """Check options of `stream` that can be judged without a model.

        Raises:
            InputError: one of them is out of range.
        """
        _sampling(SamplingParams(), temperature, top_p, top_k, min_p, repetition_penalty)
        _check_seed(seed)
        Stopper(max_new_tokens=max_new_tokens, stop=_stops(stop), decode=lambda _: "")

    def _apply_template(self, messages: list[dict[str, str]]) -> list[int]:
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise InputError(
                "prompt: this target has no chat template, so it takes no messages; give a string or token ids"
            )
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as e:  # templates are programs of their own: they raise what they like
            raise InputError(f"prompt: the chat template refuses these messages: {e}") from None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _plan(
        self,
        ids: list[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams,
        stop: str | Sequence[str],
        seed: int | None,
        logits_processor: Sequence[Processor],
        logprobs: bool,
    ) -> _Plan:
        """Check a request; nothing is computed."""
        _check_seed(seed)
        if not isinstance(logits_processor, Sequence) or not all(map(callable, logits_processor)):
            raise InputError(
                f"logits_processor={logits_processor!r}: expected a list of callables (ids, scores) -> scores"
            )
        stopper = Stopper(
            max_new_tokens=max_new_tokens,
            eos_ids=self.defaults.eos_ids,
            stop=[*_stops(stop), *self.defaults.stop],
            decode=None if self.tokenizer is None else self._decode,
        )
        source = GeneratorSource.seeded(secrets.randbits(63) if seed is None else seed)
        return _Plan(ids, self.law(len(ids), sampling, logits_processor), source, stopper, logprobs)

    def law(
        self, prompt_length: int, sampling: SamplingParams | None = None, logits_processor: Sequence[Processor] = ()
    ) -> Law:
        """What a request behind `prompt_length` tokens draws from; by default greedily, as the model's defaults ask."""
        sampling = sampling or replace(self.defaults.sampling, temperature=0.0)
        processors = self.defaults.processors(
            prompt_length, sampling.repetition_penalty, tuple(logits_processor), self.target.info.device
        )
        return Law(sampling, processors)

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class Chat:
    """A conversation; what both caches hold of earlier turns is not read again."""

    def __init__(self, model: Model, session: Session, system: str | None) -> None:
        self._model = model
        self._session = session
        self._system = system
        self._current: Generator[Piece] | None = None
        self.last_stats = Stats()
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the system message alone; an answer that is being read ends."""
        self._end_answer()
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def _end_answer(self) -> None:
        if self._current is not None:
            self._current.close()

    def send(self, text: str, **options: Any) -> Generator[Piece]:
        """Answer the next message of the user; options as for `Model.stream`, but for tree and method.

        Where the context has less room than `max_new_tokens`, the answer may be that long.

        The turn is added to `messages` when the answer has ended. An answer that is not read to its end (an
        interrupt, an error, the next message) counts with the text that was read.
        """
        self._end_answer()
        messages = [*self.messages, {"role": "user", "content": text}]
        sampling = _sampling(
            self._model.defaults.sampling,
            options.pop("temperature", 0.0),
            *(options.pop(k, None) for k in ("top_p", "top_k", "min_p", "repetition_penalty")),
        )
        defaults: dict[str, Any] = {
            "max_new_tokens": 256,
            "stop": (),
            "seed": None,
            "logits_processor": (),
            "logprobs": False,
        }
        unknown = set(options) - set(defaults)
        if unknown:
            raise InputError(f"chat: unknown options {sorted(unknown)}; expected some of {sorted(defaults)}")
        ids = self._model.encode(messages)
        wanted = {**defaults, **options}
        room = self._session.max_length - len(ids)
        if room > 0 and isinstance(wanted["max_new_tokens"], int):  # near the end of the context answers are shorter
            wanted["max_new_tokens"] = min(room, wanted["max_new_tokens"])
        plan = self._model._plan(ids, sampling=sampling, **wanted)
        check_prompt(plan.ids, plan.stopper.remaining, self._session.max_length, self._model.target)
        stream = plan.run(self._session)
        self.last_stats = stream.stats
        self._current = self._answer(stream, messages)
        return self._current

    def _answer(self, stream: Stream, messages: list[dict[str, str]]) -> Generator[Piece]:
        text = ""
        try:
            for piece in stream:
                text += piece.text
                yield piece
        finally:
            stream.close()
            self.messages = [*messages, {"role": "assistant", "content": text}]


def parse_tree(tree: str | TreeShape) -> tuple[TreeShape, int]:
    """A tree, and how many looked-up tokens are grafted to it: `TREE`, `TREE+lookup:N` or `lookup:N`.

    Raises:
        InputError: it is none of these, or no tree.
    """
    if isinstance(tree, TreeShape):
        return tree, 0
    if not isinstance(tree, str):
        raise InputError(f"tree={tree!r}: expected 'paper', 'chain:N', the path of a JSON file, or a TreeShape")
    name, found, graft = tree.rpartition("lookup:")
    if not found or not (name == "" or name.endswith("+")):
        return TreeShape.parse(tree), 0
    if not graft.isdecimal() or not 1 <= int(graft) <= 64:
        raise InputError(f"tree {tree!r}: lookup of {graft!r} tokens; expected 1 to 64, for example lookup:6")
    if name == "+" or "lookup:" in name:
        raise InputError(f"tree {tree!r}: expected TREE+lookup:N, such as chain:2+lookup:6, or lookup:N")
    return TreeShape.parse(name[:-1]) if name else TreeShape.root_only(), int(graft)


def check_method(method: str, tree: str | TreeShape | None = None) -> tuple[TreeShape, int]:
    """The tree that is meant, and its looked-up tokens; see `parse_tree`. Plain decoding has no use for either.

    Raises:
        InputError: an unknown method, a bad tree, or one that the method cannot use.
    """
    if method not in get_args(Method):
        raise InputError(f"method {method!r}: expected one of {', '.join(get_args(Method))}")
    shape, lookup = parse_tree("paper" if tree is None else tree)
    if tree is not None and method == "lookup" and not _only_lookup(shape):
        raise InputError(f"method 'lookup' with tree {tree!r}: expected lookup:N, or method eagle for a head's tree")
    return shape, lookup


def _only_lookup(shape: TreeShape) -> bool:
    return shape.num_draft_tokens == 0


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InputError(f"prompt: not valid text (a broken character at position {e.start}); expected UTF-8") from None


def _check_seed(seed: int | None) -> None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise InputError(f"seed={seed!r}: expected a whole number from 0 to 2**63 - 1, or None")


def _stops(stop: str | Sequence[str]) -> list[str]:
    if not isinstance(stop, (str, Sequence)):
        raise InputError(f"stop={stop!r}: expected a string or a list of strings")
    return [stop] if isinstance(stop, str) else list(stop)


def _sampling(
    own: SamplingParams,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    repetition_penalty: float | None,
) -> SamplingParams:
    """A request's parameters; those that it leaves open are the model's `own`."""
    return SamplingParams(
        temperature=temperature,
        top_p=own.top_p if top_p is None else top_p,
        top_k=own.top_k if top_k is None else top_k,
        min_p=own.min_p if min_p is None else min_p,
        repetition_penalty=own.repetition_penalty if repetition_penalty is None else repetition_penalty,
    )


def load(
    target: str | Path | None = None,
    head: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "auto",
) -> Model:
    """Load a target and its draft head.

    Args:
        target: A directory, a hub id or a GGUF file; None takes the built-in SmolLM2-135M-Instruct, which is fetched
            once (93 MB) and kept in a cache directory.
        head: A head's directory; None takes the shipped head if the target is the built-in one, else none: then
            method "auto" is lookup alone, and "eagle" cannot be asked for.
        device: "auto", or what torch understands ("cpu", "cuda:0", "mps").
        dtype: "auto" (float32 on a CPU, the checkpoint's own elsewhere), "float32", "bfloat16" or "float16".
        weights: On a CPU, how matrices are kept: "fp32", "fp16", "int8", or "stock" for transformers' own modules;
            "auto" is "fp32" where compiled kernels can run the model, else "stock". Output ids are the model's own in
            fp32; fp16 and int8 change the model a little, and drafting changes nothing in any of them.

    Raises:
        TargetError: the target cannot be found, read or supported.
        HeadError: the head cannot be read, or does not fit the target.
        CacheError: the built-in target cannot be fetched or is damaged.
        InputError: an option is none of those named, or two do not go together.
    """
    from eaglekit.models.checkpoint import load_head
    from eaglekit.models.load import load_target

    path, head = locate(target, head)
    loaded, tokenizer = load_target(path, device=device, dtype=dtype, weights=weights)
    model = Model.wrap(loaded, tokenizer)
    if head is not None:
        # On a CPU half precision is slow, and the head is small: float32 there, the checkpoint's own elsewhere.
        head_dtype = torch.float32 if loaded.info.device.type == "cpu" else None
        draft = load_head(Path(head), dtype=head_dtype, device=loaded.info.device)
        check_fit(draft.config, loaded.info)
        model.head = draft
    return model


def locate(target: str | Path | None, head: str | Path | None = None) -> tuple[str | Path, str | Path | None]:
    """Where a target's files and its head's are; the built-in target is fetched, a GGUF file converted, if need be.

    Raises:
        TargetError: the GGUF file cannot be read.
        CacheError: the built-in target cannot be fetched or is damaged.
    """
    from eaglekit.models import builtin, gguf_files

    if target is None:
        return builtin.fetch(), builtin.shipped_head() if head is None else head
    if str(target).lower().endswith(".gguf"):
        return gguf_files.load_gguf(Path(target)), head
    return target, head
