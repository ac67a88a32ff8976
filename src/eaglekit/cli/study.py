"""The command `eaglekit study`: which part of a head or of a recipe does how much. See `cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eaglekit.cli.common import Device, Dtype, Target, load_for_training, note
from eaglekit.train.options import SynthesisOptions, TrainOptions


def study(
    kind: Annotated[
        str,
        typer.Argument(
            help="inputs: what the head reads, the paper's ablation; text: answers of the data or the target's own; "
            "curve: how much data; layers: of the head; recipe: the options of training, one at a time."
        ),
    ],
    data: Annotated[list[Path], typer.Option(help="As of train; may be repeated. For text: dialogues.")],
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with 'turns', 'prompt' or 'messages', unlike the data, to judge heads by.")
    ],
    output: Annotated[Path, typer.Option(help="Folder of tables, heads and data; studies may share it.")],
    target: Target = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens that a head is trained on; 0 for all there are.")] = 0,
    synthesize: Annotated[
        int | None, typer.Option(min=1, help="Prompts of the data that the target answers; default: all.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Run this variation and leave the others for later; may be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Judge by the first N prompts only.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Limit of the target's answers, tokens.")
    ] = SynthesisOptions.max_new_tokens,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Longer prompts are left out.")
    ] = SynthesisOptions.max_prompt_tokens,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = TrainOptions.epochs,
    learning_rate: Annotated[float, typer.Option(help="Peak rate.")] = TrainOptions.learning_rate,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per optimizer step.")] = TrainOptions.batch_tokens,
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="Steps until the rate is at its peak, a tenth of all at most.")
    ] = TrainOptions.warmup_steps,
    vocabulary: Annotated[
        int, typer.Option(help="Tokens that heads may draft: the most frequent ones.")
    ] = TrainOptions.vocabulary,
    heldout: Annotated[
        int, typer.Option(help="Greedy answers set aside to choose the best step by, at most.")
    ] = TrainOptions.heldout,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the answers, the data's order, the noise and the weights.")
    ] = TrainOptions.seed,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Train heads that differ in one thing on the same data, judge them by the same answers, print a table."""
    from eaglekit.bench.tasks import read_tasks
    from eaglekit.train.judge.eval_head import encode_text
    from eaglekit.train.judge.study import Study
    from eaglekit.train.judge.variations import variations
    from eaglekit.train.report.study_report import markdown
    from eaglekit.train.text.forms import require

    options = TrainOptions(
        epochs=epochs,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        warmup_steps=warmup_steps,
        vocabulary=vocabulary,
        heldout=heldout,
        seed=seed,
    )
    variations(kind, options)
    tasks = read_tasks(prompts, limit)
    for file in data:
        require(file)
    name, loaded, tokenizer = load_for_training("study", target, device, dtype)
    made = Study(
        loaded,
        tokenizer,
        target_name=name,
        files=data,
        prompts=[encode_text(tokenizer, task.text) for task in tasks],
        output=output,
        options=options,
        synthesis=SynthesisOptions(max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, seed=seed),
        progress=note,
    )
    print(markdown(made.run(kind, tokens=tokens, answers=synthesize, only=only or ())), end="")
