"""What a model's own `generation_config` asks for: honoured, or reported; never dropped in silence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eaglekit.core.sampling import Processor, RepetitionPenalty, SamplingParams
from eaglekit.errors import InputError

# Values that change the output and that this library does not carry out, with the value that means "off".
_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (),
    "max_length": (),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "watermarking_config": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "constraints": (),
    "force_words_ids": (),
    "token_healing": (False,),
    "remove_invalid_values": (False,),
    "cache_implementation": ("dynamic", "static"),
    "max_time": (),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """A model's own wishes.

    Attributes:
        eos_ids: Ids that end an answer; empty if the model has none.
        stop: Stop strings.
        sampling: top_p, top_k, min_p and repetition_penalty that a request without its own values gets.
        notes: What is asked for and not carried out, one sentence each.
    """

    eos_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    notes: tuple[str, ...] = ()
    config: Any = None

    @staticmethod
    def for_model(config: Any, generation: Any, tokenizer: Any = None, notes: Sequence[str] = ()) -> GenerationDefaults:
        """Of a model's text configuration and `GenerationConfig`; the former or the tokenizer may name the EOS."""
        own = getattr(config, "eos_token_id", None)
        eos = getattr(tokenizer, "eos_token_id", None) if own is None else own
        return GenerationDefaults.of(
            generation, [] if eos is None else eos if isinstance(eos, list) else [eos], notes=notes
        )

    @staticmethod
    def of(config: Any, eos_ids: Sequence[int] = (), notes: Sequence[str] = ()) -> GenerationDefaults:
        """Read a `GenerationConfig` of transformers (or None).

        Args:
            config: The model's; values that are None were not set.
            eos_ids: Used if `config` names none.
            notes: Said besides those on `config`.
        """
        if config is None:
            return GenerationDefaults(tuple(eos_ids), notes=tuple(notes))
        values = {k: v for k, v in config.to_dict().items() if v is not None}
        sampling = {name: values[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty") if name in values}
        said = [
            *notes,
            *(
                f"the model's generation_config sets {name}={values[name]!r}, which is not carried out"
                for name, off in _NOT_DONE.items()
                if name in values and values[name] not in off
            ),
        ]
        if values.get("do_sample"):
            said.append(
                f"the model's generation_config asks for sampling (temperature {values.get('temperature', 1.0)}); "
                "decoding is greedy unless a temperature is given"
            )
        own = values.get("eos_token_id")
        own = list(eos_ids) if own is None else own if isinstance(own, list) else [own]
        odd = [i for i in own if not isinstance(i, int) or isinstance(i, bool) or i < 0]
        if odd:
            said.append(f"the model's generation_config has eos_token_id={own!r}; {odd!r} can end no answer")
            own = [i for i in own if i not in odd]
        stop = values.get("stop_strings") or ()
        return GenerationDefaults(
            tuple(own),
            (stop,) if isinstance(stop, str) else tuple(stop),
            SamplingParams(**sampling),
            tuple(said),
            config,
        )

    def processors(
        self,
        prompt_length: int,
        repetition_penalty: float,
        custom: Sequence[Processor],
        device: Any,
    ) -> tuple[Processor, ...]:
        """The processors of one request, in Hugging Face's order.

        Args:
            prompt_length: Tokens in the prompt.
            repetition_penalty: The request's.
            custom: The request's own, applied last.
            device: Where scores live.
        """

        def get(name: str) -> Any:
            return getattr(self.config, name, None)

        chosen: list[Any] = []
        penalty = [RepetitionPenalty(repetition_penalty)] if repetition_penalty != 1 else []
        if self.config is None:
            return (*penalty, *custom)
        from transformers.generation import logits_process as lp

        try:
            eos = list(self.eos_ids)
            if get("sequence_bias"):
                chosen.append(lp.SequenceBiasLogitsProcessor(get("sequence_bias")))
            chosen += penalty
            if get("no_repeat_ngram_size"):
                chosen.append(lp.NoRepeatNGramLogitsProcessor(get("no_repeat_ngram_size")))
            if get("bad_words_ids"):
                chosen.append(lp.NoBadWordsLogitsProcessor(get("bad_words_ids"), eos or None))
            if get("min_length") and eos:
                chosen.append(lp.MinLengthLogitsProcessor(get("min_length"), eos, device=str(device)))
            if get("min_new_tokens") and eos:
                chosen.append(
                    lp.MinNewTokensLengthLogitsProcessor(prompt_length, get("min_new_tokens"), eos, device=str(device))
                )
            if get("suppress_tokens"):
                chosen.append(lp.SuppressTokensLogitsProcessor(get("suppress_tokens"), device=str(device)))
            if get("begin_suppress_tokens"):
                chosen.append(
                    lp.SuppressTokensAtBeginLogitsProcessor(
                        get("begin_suppress_tokens"), prompt_length, device=str(device)
                    )
                )
        except (TypeError, ValueError, AttributeError) as e:
            raise InputError(
                f"the model's generation_config cannot be carried out ({' '.join(str(e).split())[:200]}); "
                "mend the value in generation_config.json"
            ) from None
        return (*chosen, *custom)
