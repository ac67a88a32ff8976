"""The command line. Answers go to standard output, everything else to standard error.

Exit codes: 0 done; 1 `check` found a difference; 2 the request cannot be carried out (one line says why); 130
interrupted. Each command imports what it needs when it runs, so that `--help` is instant.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eaglekit import __version__
from eaglekit.cli.common import Device, Dtype, Target, load_for_training, note, reporting
from eaglekit.cli.study import study
from eaglekit.cli.train import train
from eaglekit.errors import EaglekitError, InputError

if TYPE_CHECKING:
    from eaglekit.api import Generation, Model, Stream
    from eaglekit.core.stats import Stats

app = typer.Typer(
    name="eaglekit",
    help="The same output in fewer passes: EAGLE speculative sampling for Hugging Face decoders.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Head = Annotated[
    str | None, typer.Option(help="Directory of the draft head. Default: the shipped one, for the built-in target.")
]
Weights = Annotated[
    str,
    typer.Option(help="fp32, fp16 or int8 matrices on a CPU; stock: transformers' modules. auto: fp32 where possible."),
]
Method = Annotated[
    str, typer.Option(help="auto: EAGLE and lookup as far as they pay; eagle; lookup; plain: one token per pass.")
]
Tree = Annotated[
    str | None,
    typer.Option(
        help="paper, chain:N, or a JSON file of choices; +lookup:N behind it grafts tokens that the text suggests. "
        "Default: what pays (auto), paper (eagle)."
    ),
]
MaxNewTokens = Annotated[int, typer.Option(help="Limit of the answer, tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[
    float | None, typer.Option(help="Keep the likeliest tokens up to this sum. Default: the model's, else 1.")
]
TopK = Annotated[int | None, typer.Option(help="Keep the K likeliest tokens. Default: the model's, else all.")]
MinP = Annotated[
    float | None,
    typer.Option(help="Keep tokens at least this likely, relative to the likeliest. Default: the model's, else 0."),
]
Penalty = Annotated[
    float | None, typer.Option(help="Above 1 makes tokens that appeared less likely. Default: the model's, else 1.")
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
System = Annotated[str | None, typer.Option(help="The system message.")]


def _load(target: str | None, head: str | None, device: str, dtype: str, weights: str) -> Model:
    from eaglekit.api import load

    model = load(target, head, device=device, dtype=dtype, weights=weights)
    for line in model.defaults.notes:
        note(line)
    if model.head is None:
        note("no draft head for this target, only lookup; --head DIR names one, 'eaglekit train' makes one")
    return model


def _load_stock(target: str | None, device: str) -> Any:
    """The stock module of a target, for comparison."""
    from eaglekit.api import locate
    from eaglekit.models.load import load_hf

    path, _ = locate(target)
    return load_hf(path, device=device)[0].model


def _check_before_loading(method: str, tree: str | None, options: dict[str, Any]) -> None:
    """Refuse what no model could carry out before gigabytes are read."""
    from eaglekit.api import Model, check_method

    check_method(method, tree)
    Model.check_options(**options)


def _version(value: bool) -> None:
    if value:
        print(f"eaglekit {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The same output in fewer passes: EAGLE speculative sampling for Hugging Face decoders."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer may hold what a terminal's encoding does not


@app.command()
@reporting
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The user's message; - reads standard input.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="Read the prompt from a file; - is standard input.")] = None,
    system: System = None,
    target: Target = None,
    head: Head = None,
    method: Method = "auto",
    tree: Tree = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as text to continue, without chat template.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Decode plainly afterwards, and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
) -> None:
    """Answer one prompt, streaming the text as it is accepted."""
    text = _read_prompt(prompt, prompt_file)
    if raw and system is not None:
        raise InputError("--raw and --system: a system message needs the chat template; drop one of them")
    messages: Any = text
    if system is not None:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop or [],
    }
    _check_before_loading(method, tree, sampling)
    model = _load(target, head, device, dtype, weights)
    options = {**sampling, "tree": tree, "chat_template": not raw}
    stream = model.stream(messages, method=method, **options)  # type: ignore[arg-type]
    out = stream.result() if as_json else _print_stream(stream)
    plain = model.generate(messages, method="plain", **options) if compare else None
    if as_json:
        print(json.dumps({**out.to_dict(), **({} if plain is None else {"plain": _comparison(out, plain)})}))
        return
    note(_describe(out.stats))
    if plain is not None:
        note(_describe_comparison(out, plain, greedy=temperature == 0))


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise InputError("generate: give a prompt or --prompt-file FILE, and not both")
    if prompt is not None and prompt != "-":
        text = prompt
    elif prompt == "-" or prompt_file == "-":
        if sys.stdin is None:
            raise InputError("generate: standard input is closed; give the prompt as an argument")
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError:
            raise InputError("generate: standard input is not UTF-8 text; convert it") from None
    else:
        try:
            text = Path(str(prompt_file)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
            raise InputError(f"--prompt-file {prompt_file}: cannot be read ({reason})") from None
    if not text.strip():
        raise InputError("generate: the prompt is empty; give some text")
    return text


def _print_stream(stream: Stream) -> Generation:
    for piece in stream:
        print(piece.text, end="", flush=True)
    print(flush=True)
    return stream.result()


def _describe(stats: Stats) -> str:
    total = stats.total_seconds or 1.0
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in stats.seconds.items())
    return (
        f"{stats.new_tokens} tokens in {stats.total_seconds:.2f} s ({stats.tokens_per_second:.1f} tokens/s), "
        f"τ {stats.tau:.2f} over {stats.rounds} rounds; time: {shares}"
    )


def _comparison(out: Generation, plain: Generation) -> dict[str, Any]:
    return {
        "token_ids": plain.token_ids,
        "identical": out.token_ids == plain.token_ids,
        "stats": plain.stats.to_dict(),
        "speedup": round(out.stats.tokens_per_second / plain.stats.tokens_per_second, 4)
        if plain.stats.tokens_per_second
        else None,
    }


def _describe_comparison(out: Generation, plain: Generation, *, greedy: bool) -> str:
    if not plain.stats.tokens_per_second:
        return "plain decoding: nothing to compare"
    ratio = out.stats.tokens_per_second / plain.stats.tokens_per_second
    line = (
        f"plain decoding, same prompt and weights: {plain.stats.tokens_per_second:.1f} tokens/s; "
        f"this run was {ratio:.2f}x as fast; "
    )
    if not greedy:
        return line + "sampled outputs follow the same law (see 'eaglekit check'), not the same draws"
    if out.token_ids == plain.token_ids:
        return line + f"both outputs are identical ({len(out.token_ids)} tokens)"
    return line + "THE OUTPUTS DIFFER: run 'eaglekit check' to see whether it is a near tie"


@app.command()
@reporting
def chat(
    system: System = None,
    target: Target = None,
    head: Head = None,
    method: Method = "auto",
    tree: Tree = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
) -> None:
    """Talk. /reset begins anew, /stats shows numbers, /quit leaves; Ctrl-C stops one answer only."""
    from eaglekit.core.stats import Stats

    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    _check_before_loading(method, tree, options)
    if sys.stdin is None:
        raise InputError("chat: standard input is closed, so there is nobody to talk to")
    model = _load(target, head, device, dtype, weights)
    talk = model.chat(system=system, tree=tree, method=method)  # type: ignore[arg-type]
    total = Stats()
    if sys.stdin.isatty():
        note("type a message; /reset, /stats, /quit; Ctrl-C stops an answer")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError:
            note("error: that line is not UTF-8 text")
            continue
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return
        if not line:
            continue
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            talk.reset()
            note("a new conversation")
        elif line == "/stats":
            note(
                _describe(total)
                + f"; {total.cached_prompt_tokens} of {total.prompt_tokens} prompt tokens from the cache"
            )
        elif line.startswith("/"):
            note(f"unknown command {line.split()[0]}; known: /reset, /stats, /quit")
        else:
            _answer(talk, line, options, total)


def _answer(talk: Any, line: str, options: dict[str, Any], total: Stats) -> None:
    """One turn of a chat; an error or Ctrl-C ends the turn, not the chat."""
    try:
        pieces = talk.send(line, **options)
    except InputError as e:
        note(f"error: {e} (/reset begins a new conversation)")
        return
    try:
        for piece in pieces:
            print(piece.text, end="", flush=True)
    except EaglekitError as e:
        note(f"error: {e} (/reset begins a new conversation)")
    except KeyboardInterrupt:
        print(" …", end="")
    finally:
        pieces.close()
        print(flush=True)
        total.add(talk.last_stats)


@app.command()
@reporting
def check(
    target: Target = None,
    head: Head = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less evidence, in under a minute.")] = False,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts decoded greedily.")] = None,
    draws: Annotated[int | None, typer.Option(min=30, help="Draws of each G-test.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides everything random.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
) -> None:
    """Is it lossless here? Greedy identity, laws above temperature 0, purity of the caches; exit code 1 if not."""
    import dataclasses

    from eaglekit.bench import lossless

    options = lossless.CheckOptions.quick() if quick else lossless.CheckOptions()
    changes: dict[str, Any] = {"seed": seed}
    if prompts is not None:
        changes["identity_prompts"] = prompts
    if draws is not None:
        changes["draws"] = draws
    model = _load(target, head, device, dtype, weights)
    found = []
    for finding in lossless.check(model, dataclasses.replace(options, **changes)):
        found.append(finding)
        if not as_json:
            print(f"{'PASS' if finding.passed else 'FAIL'}  {finding.name}: {finding.detail}", flush=True)
    passed = all(f.passed for f in found)
    if as_json:
        print(
            json.dumps(
                {"passed": passed, "target": model.target.info.name, "findings": [dataclasses.asdict(f) for f in found]}
            )
        )
    else:
        failed = sum(not f.passed for f in found)
        print(
            f"{'PASS' if passed else 'FAIL'}  {len(found) - failed} of {len(found)} checks on {model.target.info.name}"
        )
    if not passed:
        raise typer.Exit(1)


bench_app = typer.Typer()
app.add_typer(bench_app, name="bench")


@bench_app.callback(invoke_without_command=True)
@reporting
def bench(
    context: typer.Context,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with 'turns', 'prompt' or 'messages'; first turns are used.", show_default="required"
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="transformers, plain, auto, eagle or eagle:TREE, @TEMPERATURE behind it; may be repeated. "
            "Default: plain, auto, eagle:paper, eagle:chain:5."
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first N prompts only.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON report here, after every prompt.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Keep answers here; a run that was stopped goes on. Times then alternate less.")
    ] = None,
    target: Target = None,
    head: Head = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides everything random.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
) -> None:
    """Measure acceptance and speed: every method on every prompt in turn, the same weights and limits for all."""
    if context.invoked_subcommand is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
        if given:
            raise InputError(f"bench: put --{given[0].replace('_', '-')} behind {context.invoked_subcommand}")
        return
    if prompts is None:
        raise InputError("bench: --prompts is missing; expected a file of JSON lines, or the command 'speed'")
    from eaglekit.bench import run as runner
    from eaglekit.bench.tasks import read_tasks

    tasks = read_tasks(prompts, limit)
    specs = [runner.MethodSpec.parse(m) for m in method or ("plain", "auto", "eagle:paper", "eagle:chain:5")]
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens {max_new_tokens}: expected at least 1")
    for option, path in (("--output", output), ("--record", record)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise InputError(f"{option} {path}: expected a file in a folder that exists")
    model = _load(target, head, device, dtype, weights)
    settings = {"file": prompts.name, "max_new_tokens": max_new_tokens, "seed": seed, "batch": 1}
    stock = _load_stock(target, device) if any(spec.kind == "transformers" for spec in specs) else None
    names = {"target": model.target.info.name, "head": head or (None if target else "shipped"), "dtype": dtype}
    names["weights"] = getattr(model.target, "weights", "stock")
    kept = None if record is None else runner.Record(record, {**settings, **names})
    data: dict[str, Any] = {}
    runs = runner.run(model, tasks, specs, max_new_tokens=max_new_tokens, seed=seed, record=kept, stock=stock)
    for number, results in enumerate(runs, 1):
        data = runner.report(model, results, settings)
        if output is not None:
            output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        rates = ", ".join(f"{k} {m['tokens_per_second'].get('median', 0):.1f}" for k, m in data["methods"].items())
        note(f"{number} of {len(tasks)} prompts; tokens/s: {rates}")
    print(runner.table(data))
    print(json.dumps(data))


@bench_app.command()
@reporting
def speed(
    target: Target = None,
    head: Head = None,
    weights: Annotated[
        list[str] | None, typer.Option(help="fp32, fp16, int8; may be repeated, or joined by commas. Default: all.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="decode, cost, context, phases, scripted, batch, start or rivals; may be repeated. "
            "Default: all but rivals."
        ),
    ] = None,
    rivals: Annotated[bool, typer.Option("--rivals", help="Measure xllamacpp and openvino-genai too.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with 'turns', 'prompt' or 'messages'. Default: eight short ones.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first N prompts only.")] = None,
    tree: Annotated[
        list[str] | None, typer.Option(help="EAGLE's trees besides auto; may be repeated. Default: paper, chain:5.")
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    repeats: Annotated[int, typer.Option(help="Passes of each kind.")] = 20,
    alpha: Annotated[float, typer.Option(help="scripted: probability of a right step.")] = 0.8,
    steps: Annotated[int, typer.Option(help="scripted: drafts per round.")] = 5,
    sequences: Annotated[int, typer.Option(help="batch: sequences at once.")] = 32,
    batch_tokens: Annotated[int, typer.Option(help="batch: new tokens of each.")] = 128,
    starts: Annotated[int, typer.Option(help="start: processes per format.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of orders and dice.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder for speed.json, written after every section, and speed.png.")
    ] = None,
) -> None:
    """Measure what the engine costs on this CPU: rates, passes, phases, batches, start; against transformers."""
    from eaglekit.bench import plots, speed_table
    from eaglekit.bench import speed as measuring
    from eaglekit.bench.tasks import read_tasks

    formats = tuple(w for text in weights or () for w in text.split(","))
    defaults = measuring.SpeedOptions
    options = defaults(
        weights=formats if weights else defaults.weights,
        only=tuple(only or ()),
        rivals=rivals,
        trees=tuple(tree) if tree else defaults.trees,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        alpha=alpha,
        steps=steps,
        sequences=sequences,
        batch_tokens=batch_tokens,
        starts=starts,
        seed=seed,
    )
    texts = None if prompts is None else [task.text for task in read_tasks(prompts, limit)]
    if output is not None:
        if output.exists() and not output.is_dir():
            raise InputError(f"--output {output}: a file; expected a folder, or a name for a new one")
        output.mkdir(parents=True, exist_ok=True)
    setup = measuring.Setup.load(target, head, options, texts, limit)
    report: dict[str, Any] = {}
    for report in measuring.measure(setup, options, note):
        if output is not None:
            text = json.dumps(report, indent=1, ensure_ascii=False)
            (output / "speed.json").write_text(text + "\n", encoding="utf-8")
    if output is not None:
        if not plots.available():
            note("no picture: it needs matplotlib; pip install matplotlib")
        elif plots.draw(report, output / "speed.png"):
            note(f"{output / 'speed.png'} drawn")
    print(speed_table.table(report))
    print(json.dumps(report))


@app.command()
@reporting
def eval_head(
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with 'turns', 'prompt' or 'messages'; first turns are used.")
    ],
    target: Target = None,
    head: Head = None,
    max_new_tokens: MaxNewTokens = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first N prompts only.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Judge a draft head by what the target says to prompts: acceptance by depth, n-α and τ; nothing is timed."""
    import torch

    from eaglekit.bench.tasks import read_tasks
    from eaglekit.models import builtin
    from eaglekit.models.checkpoint import check_fit, load_head
    from eaglekit.train.judge.eval_head import encode_text
    from eaglekit.train.judge.eval_head import eval_head as judge

    tasks = read_tasks(prompts, limit)
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens {max_new_tokens}: expected at least 1")
    if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
        raise InputError(f"--json {json_file}: expected a file in a folder that exists")
    if head is None and target is not None:
        raise InputError(f"eval-head: no head was given for {target}; name one with --head DIR, or train it first")
    folder = Path(head) if head is not None else builtin.shipped_head()
    draft = load_head(folder, dtype=torch.float32)
    name, loaded, tokenizer = load_for_training("eval-head", target, device, dtype)
    check_fit(draft.config, loaded.info)
    draft.to(loaded.info.device)
    ids = [encode_text(tokenizer, task.text) for task in tasks]
    report = judge(loaded, tokenizer, draft, ids, max_new_tokens=max_new_tokens, progress=note)
    print(report.table())
    if json_file is not None:
        facts = {"target": name, "head": head or "shipped", "file": prompts.name}
        data = {**facts, "max_new_tokens": max_new_tokens, **report.to_dict()}
        json_file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@app.command()
@reporting
def fetch(
    force: Annotated[bool, typer.Option("--force", help="Make everything anew.")] = False,
) -> None:
    """Fetch the built-in target (93 MB) and unpack it once; later starts need no network."""
    from eaglekit.models import builtin

    print(builtin.fetch(force=force))


app.command()(reporting(train))
app.command()(reporting(study))
