"""The command `eaglekit train`: from text, or none at all, to a draft head. See `cli`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from eaglekit.cli.common import Device, Target, fail, load_for_training
from eaglekit.errors import EaglekitError, InputError
from eaglekit.train.options import FEATURE_CACHE_GB, HeadOptions, SelfTalkOptions, SynthesisOptions, TrainOptions

_STEP_WEIGHTS = ",".join(map("{:g}".format, TrainOptions.step_weights))
DATA, RECIPE, SHAPE = "Data", "Recipe", "Shape of a new head"


def _use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Let the options of a file stand in for those that the command line leaves out."""
    if path is not None:
        from eaglekit.train.config_file import read_config

        known = {
            str(option.name): bool(getattr(option, "multiple", False))
            for option in context.command.params
            if option.name not in ("config", "help")
        }
        try:
            context.default_map = {**(context.default_map or {}), **read_config(path, known)}
        except EaglekitError as e:
            fail(str(e))
    return path


def train(
    output: Annotated[Path, typer.Option(help="Folder of the head, and of everything on the way.")],
    target: Target = None,
    init: Annotated[Path | None, typer.Option(help="Start from this head instead of random weights.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted training.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=_use_config,
            help="YAML file of these options, named as here without dashes in front; the command line wins.",
        ),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="Of the target: auto, float32, bfloat16 or float16.")] = "auto",
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="With several processes: shard the head over them, in place of copies.")
    ] = False,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines, parquet, or a dataset: a folder, or org/name[:config][:split] of the Hugging Face hub; "
            "may be repeated. 'turns' are prompts that the target answers; dialogues in 'messages' or 'conversations' "
            "and plain 'text' are used as they are.",
            rich_help_panel=DATA,
        ),
    ] = None,
    synthesize: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompts of the data that the target answers, in the seed's order; default: all. Without --data: "
            "dialogues that the target writes all by itself.",
            rich_help_panel=DATA,
        ),
    ] = None,
    turns: Annotated[
        int, typer.Option(min=1, help="Without --data: most turns of the user in a dialogue.", rich_help_panel=DATA)
    ] = SelfTalkOptions.turns,
    given_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of given dialogues used; 0 for all.", rich_help_panel=DATA)
    ] = 0,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Longer prompts are left out.", rich_help_panel=DATA)
    ] = SynthesisOptions.max_prompt_tokens,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Limit of the target's answers, tokens.", rich_help_panel=DATA)
    ] = SynthesisOptions.max_new_tokens,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad", help="Leave out rows of the data that cannot be read, and count them.", rich_help_panel=DATA
        ),
    ] = False,
    feature_cache_gb: Annotated[
        float,
        typer.Option(
            min=0,
            help="Keep features on disk if they take at most so much, else read them on the fly; 0 keeps none.",
            rich_help_panel=DATA,
        ),
    ] = FEATURE_CACHE_GB,
    heldout: Annotated[
        int,
        typer.Option(
            help="Greedy answers set aside to judge the head by, one dialogue in ten at most.", rich_help_panel=DATA
        ),
    ] = TrainOptions.heldout,
    eval_overlap: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines with 'turns', 'prompt' or 'messages' that heads will be judged by, may be repeated: the "
            "head's card says how many of them are in the training prompts.",
            rich_help_panel=DATA,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=0, help="Of the answers, the data's order, the noise and the weights.", rich_help_panel=DATA),
    ] = TrainOptions.seed,
    epochs: Annotated[float, typer.Option(help="Passes over the data.", rich_help_panel=RECIPE)] = TrainOptions.epochs,
    learning_rate: Annotated[
        float,
        typer.Option(help="Peak rate; 3e-5 is the paper's, for widths of 4096 and more.", rich_help_panel=RECIPE),
    ] = TrainOptions.learning_rate,
    batch_tokens: Annotated[
        int,
        typer.Option(help="Tokens per optimizer step, of all processes together.", rich_help_panel=RECIPE),
    ] = TrainOptions.batch_tokens,
    accumulate: Annotated[
        int,
        typer.Option(
            help="Passes over a step's tokens: more need less memory, and change nothing else.", rich_help_panel=RECIPE
        ),
    ] = TrainOptions.accumulate,
    warmup_steps: Annotated[
        int,
        typer.Option(
            min=0, help="Steps until the rate is at its peak, a tenth of all at most.", rich_help_panel=RECIPE
        ),
    ] = TrainOptions.warmup_steps,
    final_rate: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the peak that is left at the end.", rich_help_panel=RECIPE),
    ] = TrainOptions.final_rate,
    weight_decay: Annotated[float, typer.Option(help="AdamW's.", rich_help_panel=RECIPE)] = TrainOptions.weight_decay,
    regression: Annotated[
        float, typer.Option(help="Weight of the distance of features; 1 in the paper.", rich_help_panel=RECIPE)
    ] = TrainOptions.regression,
    classification: Annotated[
        float, typer.Option(help="Weight of the cross-entropy; 0.1 in the paper.", rich_help_panel=RECIPE)
    ] = TrainOptions.classification,
    step_weights: Annotated[
        str,
        typer.Option(
            help="A weight for each unrolled step, with commas; 1 alone is the paper's teacher forcing.",
            rich_help_panel=RECIPE,
        ),
    ] = _STEP_WEIGHTS,
    scaled: Annotated[
        bool,
        typer.Option(
            "--scaled/--unscaled",
            help="Distances and noise in standard deviations of the features; the paper's are not.",
            rich_help_panel=RECIPE,
        ),
    ] = TrainOptions.scaled,
    noise: Annotated[
        float, typer.Option(help="Half-width of the noise on features.", rich_help_panel=RECIPE)
    ] = TrainOptions.noise,
    top_k: Annotated[
        int,
        typer.Option(
            min=0, help="Teach the target's K likeliest tokens alone; 0 for its whole law.", rich_help_panel=RECIPE
        ),
    ] = TrainOptions.top_k,
    ema: Annotated[
        float,
        typer.Option(help="Keep an average of the weights, such as 0.998; 0 for none.", rich_help_panel=RECIPE),
    ] = TrainOptions.ema,
    linear_start: Annotated[
        bool,
        typer.Option(
            "--linear-start/--no-linear-start",
            help="Fit the input layer of a new head by least squares first; never with --init.",
            rich_help_panel=RECIPE,
        ),
    ] = TrainOptions.linear_start,
    bfloat16: Annotated[
        bool,
        typer.Option("--bf16/--fp32", help="Compute in bfloat16; weights stay float32.", rich_help_panel=RECIPE),
    ] = TrainOptions.bfloat16,
    eval_every: Annotated[
        int, typer.Option(help="Steps between evaluations.", rich_help_panel=RECIPE)
    ] = TrainOptions.eval_every,
    patience: Annotated[
        int,
        typer.Option(min=0, help="Stop after so many evaluations without a better τ; 0 never.", rich_help_panel=RECIPE),
    ] = TrainOptions.patience,
    checkpoint_minutes: Annotated[
        float, typer.Option(min=0, help="Time between checkpoints.", rich_help_panel=RECIPE)
    ] = TrainOptions.checkpoint_minutes,
    vocabulary: Annotated[
        int,
        typer.Option(help="Tokens that the head may draft: the most frequent ones.", rich_help_panel=SHAPE),
    ] = TrainOptions.vocabulary,
    inputs: Annotated[
        str,
        typer.Option(
            help="What the head reads: feature+shifted-token (EAGLE), feature+token, feature or token.",
            rich_help_panel=SHAPE,
        ),
    ] = HeadOptions.inputs,
    features: Annotated[
        str,
        typer.Option(
            help="last: the target's last feature (EAGLE); fused: of three layers (EAGLE-3's input), best with "
            "--input-norm.",
            rich_help_panel=SHAPE,
        ),
    ] = HeadOptions.features,
    layers: Annotated[
        float, typer.Option(help="Decoder layers; 0.5 is attention alone.", rich_help_panel=SHAPE)
    ] = HeadOptions.layers,
    mlp_width: Annotated[
        float, typer.Option(help="Factor on the width of the target's MLP.", rich_help_panel=SHAPE)
    ] = HeadOptions.mlp_width,
    bias: Annotated[
        bool, typer.Option("--bias/--no-bias", help="Of the input layer; vLLM drops it.", rich_help_panel=SHAPE)
    ] = HeadOptions.bias,
    input_norm: Annotated[
        bool,
        typer.Option("--input-norm/--no-input-norm", help="Norms on what the head reads.", rich_help_panel=SHAPE),
    ] = HeadOptions.input_norm,
) -> None:
    """Train a draft head: the target answers prompts, its features are read, the head learns to predict them.

    Started by torchrun or accelerate launch, all processes train one head together.
    """
    options = TrainOptions(
        epochs=epochs,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        accumulate=accumulate,
        warmup_steps=warmup_steps,
        final_rate=final_rate,
        weight_decay=weight_decay,
        regression=regression,
        classification=classification,
        step_weights=_weights(step_weights),
        scaled=scaled,
        noise=noise,
        top_k=top_k,
        ema=ema,
        linear_start=linear_start,
        bfloat16=bfloat16,
        eval_every=eval_every,
        patience=patience,
        checkpoint_minutes=checkpoint_minutes,
        vocabulary=vocabulary,
        heldout=heldout,
        seed=seed,
    )
    shape = HeadOptions(inputs, features, layers, mlp_width, bias, input_norm)
    if not data and synthesize is None:
        raise InputError("train: nothing to train on; expected --data FILE, or --synthesize N (the target writes it)")
    if init is not None and shape != HeadOptions():
        raise InputError(
            f"--init {init}: that head has a shape of its own; leave out the options of a new head's shape"
        )
    from eaglekit.bench.tasks import read_tasks
    from eaglekit.train.head.processes import Processes
    from eaglekit.train.pipeline import train_head
    from eaglekit.train.report.card import CardInfo
    from eaglekit.train.report.monitor import Monitor
    from eaglekit.train.text.forms import require

    for file in data or ():
        require(file)
    card = CardInfo(
        command=shlex.join(["eaglekit", *sys.argv[1:]]),
        target=target or "",
        base_model=_base_model(target),
        evaluation={str(file): [task.text for task in read_tasks(file)] for file in eval_overlap or ()},
    )
    processes = Processes(device, sharded=fsdp)
    name, loaded, tokenizer = load_for_training("train", target, str(processes.device), dtype)
    with Monitor(output, log_every=options.log_every, active=processes.main) as monitor:
        result = train_head(
            loaded,
            tokenizer,
            target_name=name,
            files=data or [],
            output=output,
            options=options,
            synthesis=SynthesisOptions(max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, seed=seed),
            answers=synthesize,
            given_tokens=given_tokens,
            talk=SelfTalkOptions(turns=turns),
            skip_bad=skip_bad,
            feature_cache_gb=feature_cache_gb,
            shape=shape,
            init=init,
            resume=resume,
            processes=processes,
            card=card,
            progress=monitor.say,
            on_step=monitor.on_step,
        )
    if processes.main:
        tau = ", ".join(f"{name} {value:.2f}" for name, value in result.best.tau.items())
        print(f"{output}: τ on held-out answers {tau} after {result.best_step} of {result.steps} steps")


def _base_model(target: str | None) -> str:
    """The target's name on the hub; empty where it has none that is known."""
    if target is None:
        return "HuggingFaceTB/SmolLM2-135M-Instruct"  # what the built-in target was made from
    return target if target.count("/") == 1 and not Path(target).exists() else ""


def _weights(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--step-weights {text!r}: expected numbers with commas, such as 1,0.8,0.64") from None
