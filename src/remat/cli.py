"""The command `remat`: look at a plan, see the demo.

What the user got wrong is said in one line on stderr with exit code 2; Ctrl-C ends with 130. torch is imported only by
the commands that run something.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import msgspec
import typer

from . import __version__, checking, measuring, memory, options, problems, reporting
from .chains import Chain
from .errors import InfeasibleBudget, RematError, UnsupportedChain
from .options import option
from .planners import names
from .plans import BYTES, Plan, Units, plan, problem_in_slots
from .report import text_picture

app = typer.Typer(
    help="Train any network inside a memory budget, at the least extra compute, bit for bit.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    try:
        code = app(list(arguments) if arguments is not None else None, prog_name="remat", standalone_mode=False)
        sys.stdout.flush()
    except (typer.TyperException, InfeasibleBudget, UnsupportedChain) as error:
        return _complain(error.format_message() if isinstance(error, typer.TyperException) else str(error), 2)
    except RematError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough; Python would complain again when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    print("remat:", " ".join(message.split()), file=sys.stderr)
    return code


@app.callback(invoke_without_command=True)
def _remat(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Say the version and end.")] = False,
) -> None:
    if version:
        print(f"remat {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


# ---- remat plan


@app.command("plan")
def _plan(
    chain_file: Annotated[
        Path | None,
        typer.Argument(metavar="[CHAIN.json]", help="Instead of sizes: a chain as remat profile writes it."),
    ] = None,
    steps: options.Steps = None,
    carry: options.Carry = None,
    tape: options.TapeSize = None,
    budget: Annotated[int | None, option(options.size, "SIZE", "The memory that there is.")] = None,
    slots: Annotated[
        int | None,
        option(options.count, "N", "Instead, in the papers' units: internal states (ism) or hidden states."),
    ] = None,
    alpha: Annotated[
        int | None, option(options.count, "N", "With --slots: an internal state's cost in hidden states (2).")
    ] = None,
    planner: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of {', '.join(names())} (tight; auto for a file).")
    ] = "",
    forward_ms: options.ForwardMs = None,
    record_ms: options.RecordMs = None,
    backward_ms: options.BackwardMs = None,
    workspace: options.Workspace = None,
    json_file: options.JsonFile = None,
    actions: Annotated[bool, typer.Option("--actions", help="With --json: write every action too.")] = False,
    picture: Annotated[str | None, option(options.picture, "FILE", "Draw memory over time (.png, .svg, .pdf).")] = None,
) -> None:
    """Plan a chain and explain the plan.

    In bytes: remat plan --steps 1000 --carry 32KiB --tape 120KiB --budget 5MiB

    From a file: remat plan chain.json --budget 2GiB

    In the papers' units: remat plan --steps 1000 --slots 50 --planner ism
    """
    in_bytes = {"--carry": carry, "--tape": tape, "--budget": budget, "--workspace": workspace}
    times = {"--forward-ms": forward_ms, "--record-ms": record_ms, "--backward-ms": backward_ms}
    in_slots = {"--slots": slots, "--alpha": alpha}
    planner = planner or ("auto" if chain_file else "tight")
    _check_options(chain_file, {"--steps": steps, **in_bytes, **times}, in_slots, actions and json_file is None)
    problems.check_planner(planner)
    if chain_file is not None:
        chain, budget_bytes, units = problems.read_chain(chain_file), budget or 0, BYTES
    elif slots is not None:
        chain, budget_bytes, units = problem_in_slots(planner, steps or 0, slots, alpha or 2)
    else:
        chain = problems.repeated(steps or 0, carry or 0, tape or 0, workspace or 0, *times.values())
        budget_bytes, units = budget or 0, BYTES
    made = _made(chain, budget_bytes, planner, slots, units)
    with options.writing("--picture", picture):
        if picture is not None:
            made.plot(picture)
    with options.writing("--json", json_file):
        if json_file is not None:
            _write_json(json_file, made, units, actions)
    if json_file != "-":
        _show(made, units)


def _made(chain: Chain, budget_bytes: int, planner: str, slots: int | None, units: Units) -> Plan:
    """The plan; a refusal in the units that were asked in."""
    try:
        return plan(chain, budget_bytes, planner)
    except InfeasibleBudget as error:
        if slots is None:
            raise
        least = units.count(error.smallest_budget_bytes)
        raise typer.TyperException(
            f"--slots {slots}: too few for {planner}; the smallest that works is {least}"
        ) from None


def _check_options(
    chain_file: Path | None,
    in_bytes: Mapping[str, object],
    in_slots: Mapping[str, object],
    lone_actions: bool,
) -> None:
    given = [name for name, value in {**in_bytes, **in_slots}.items() if value is not None]
    slots = in_slots["--slots"] is not None
    if chain_file is not None:
        if others := [name for name in given if name != "--budget"]:
            raise typer.TyperException(f"{chain_file} says all about the chain and excludes {', '.join(others)}")
        needed = ["--budget"]
    else:
        if in_bytes["--steps"] is None:
            raise typer.TyperException("--steps missing: give it with sizes or with --slots, or a chain's file instead")
        needed = [] if slots else ["--carry", "--tape", "--budget"]
    excluded = [name for name in given if name in in_bytes and name != "--steps"]
    if slots and excluded:
        raise typer.TyperException(f"--slots counts in the papers' units and excludes {', '.join(excluded)}")
    missing = [name for name in needed if in_bytes[name] is None]
    if missing:
        ways = "" if chain_file else ": give --carry, --tape and --budget, or --slots alone"
        raise typer.TyperException(f"{', '.join(missing)} missing{ways}")
    if in_slots["--alpha"] is not None and not slots:
        raise typer.TyperException("--alpha belongs to --slots; in bytes, --carry and --tape say the same")
    if lone_actions:
        raise typer.TyperException("--actions writes into the file of --json, which is missing")


def _write_json(path: str, made: Plan, units: Units, actions: bool) -> None:
    """One JSON object; the actions are streamed, so that a million of them need no memory."""
    figures = {
        "planner": made.planner,
        "steps": made.chain.length,
        "forward_runs": made.forward_runs,
        f"peak_{units.name}": units.peak(made),
        f"budget_{units.name}": units.count(made.budget_bytes),
        "seconds": made.seconds,
    }
    text = json.dumps(figures, indent=2)
    options.write(path, [text, "\n"] if not actions else _with_actions(text, made))


def _with_actions(text: str, made: Plan) -> Iterator[str]:
    yield text.removesuffix("\n}") + ',\n  "actions": ['
    encode = msgspec.json.Encoder().encode
    for position, action in enumerate(made.schedule):
        yield (",\n    " if position else "\n    ") + encode(action).decode()
    yield "\n  ]\n}\n"


def _show(made: Plan, units: Units) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for subject, sentence in made.facts(units):
        for k, line in enumerate(wrap(sentence, 66)):
            console.print(Text.assemble((("" if k else subject).ljust(14), "bold"), line))
    print()
    label = units.size if units is BYTES else "{:.6g}".format
    print(text_picture(made.chain, made.schedule, made.simulation, made.budget_bytes, label))


# ---- remat demo


@app.command("demo")
def _demo(
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What is read; Python's standard library if not given.")
    ] = None,
    length: Annotated[
        int | None, option(options.count, "N", "How many characters gradients go back over (1000).")
    ] = None,
    budget: Annotated[
        float | None, option(options.budget, "SIZE", "Bytes, or a percentage of what plain takes (5%).")
    ] = None,
    iterations: Annotated[int | None, option(options.count, "N", "At most so many (20).")] = None,
    json_file: options.JsonFile = None,
    picture: Annotated[str | None, option(options.picture, "FILE", "Memory over time (demo.png).")] = None,
) -> None:
    """Train a character LSTM on real text twice side by side: plainly, and within a budget."""
    from rich.console import Console

    from .demo import read_tokens, summary, train

    console = Console(stderr=json_file == "-", highlight=False)
    length, picture = length or 1000, picture or "demo.png"
    try:
        tokens = read_tokens(text, length)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise typer.TyperException(f"--text {text}: {reason}") from None
    subject = text or "Python's standard library"
    console.print(f"A character LSTM reads {subject}, {length} characters at a time.")
    outcome = train(console, tokens, length=length, budget=budget or 0.05, iterations=iterations or 20)
    console.print(summary(outcome))
    with options.writing("--picture", picture):
        outcome.draw(picture)
    console.print(f"Memory over time: {picture}")
    with options.writing("--json", json_file):
        if json_file is not None:
            options.write(json_file, [json.dumps(outcome.figures(), indent=2), "\n"])


# ---- remat curve


@app.command("curve")
def _curve(
    steps: options.Steps = None,
    carry: options.Carry = None,
    tape: options.TapeSize = None,
    alpha: Annotated[
        int | None, option(options.count, "N", "Instead, in the papers' units: an internal state's cost.")
    ] = None,
    forward_ms: options.ForwardMs = None,
    record_ms: options.RecordMs = None,
    backward_ms: options.BackwardMs = None,
    workspace: options.Workspace = None,
    chain_file: options.ChainFile = None,
    json_file: Annotated[
        str | None, option(options.output, "FILE", "Write the curve; '-' is stdout.", "--json")
    ] = None,
    picture: Annotated[str | None, option(options.picture, "FILE", "Draw the curve (.png, .svg, .pdf).")] = None,
) -> None:
    """All budgets and what an iteration takes within each, from the smallest to where more gains nothing.

    In bytes: remat curve --steps 1000 --carry 32KiB --tape 120KiB

    In the papers' units: remat curve --steps 1000 --alpha 5
    """
    from . import curves
    from .tradeoff import tradeoff

    sizes = {"--carry": carry, "--tape": tape, "--workspace": workspace}
    times = {"--forward-ms": forward_ms, "--record-ms": record_ms, "--backward-ms": backward_ms}
    problems.check_source(chain_file, {"--steps": steps, "--alpha": alpha, **sizes, **times})
    units = BYTES
    if chain_file is not None:
        chain = problems.read_chain(chain_file)
    elif alpha is not None:
        chain, _, units = problem_in_slots("tight", steps or 0, 1, alpha)
    else:
        chain = problems.repeated(steps or 0, carry or 0, tape or 0, workspace or 0, *times.values())
    curve = tradeoff(chain)
    with options.writing("--picture", picture):
        if picture is not None:
            curves.draw(picture, curve, units)
    with options.writing("--json", json_file):
        if json_file is not None:
            options.write(json_file, [json.dumps(curves.figures(curve, units), indent=2), "\n"])
    if json_file != "-":
        curves.show(curve, units)


# ---- remat profile

app.command("profile")(measuring.command)


# ---- remat report

app.command("report")(reporting.report)


# ---- remat figures


@app.command("figures")
def _figures(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where pictures and tables go.")] = Path("figures"),
    quick: Annotated[bool, typer.Option("--quick", help="Shorter sequences, for a first look.")] = False,
) -> None:
    """The results of the two papers as pictures and CSV tables; one of them is measured on this machine."""
    from .figures import NAMES, reproduce

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.TyperException(f"--out {out}: cannot be written: {error.strerror}") from None
    with options.writing("--out", str(out)):
        for number, (name, finding) in enumerate(reproduce(out, quick=quick), 1):
            print(f"{number}/{len(NAMES)} {name}: {finding}", flush=True)


app.command("memory")(memory.command)

# ---- remat check

app.command("check")(checking.command)


# ---- remat bench


@app.command("bench")
def _bench(
    name: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="resnet1000")],
    layers: Annotated[int | None, option(options.count, "N", "Layers, 9n + 2; else 1001.")] = None,
    batch: Annotated[int | None, option(options.count, "N", "Images in a batch; else 8.")] = None,
    size: Annotated[int | None, option(options.count, "N", "Pixels along a side of an image; else 32.")] = None,
    rounds: Annotated[int | None, option(options.count, "N", "Iterations timed for each budget; else 3.")] = None,
) -> None:
    """Chen's headline on this machine: a residual network of 1001 layers, plain and within budgets; takes minutes."""
    if name != "resnet1000":
        raise typer.TyperException(f"EXPERIMENT must be resnet1000, not {name!r}")
    from .deep import Refused, experiment

    print("budget     peak measured   of plain   time / plain   foreseen   gradients")
    for result in experiment(layers or 1001, batch or 8, size or 32, rounds or 3):
        if isinstance(result, int):
            plain_bytes = result
            print(f"{'none':<8} {plain_bytes / 2**20:11.2f} MiB {1:10.1%} {1:14.3f} {'':10}", flush=True)
            continue
        if isinstance(result, Refused):
            least = result.smallest_budget_bytes / plain_bytes
            print(f"{result.share:<8.1%} too small: {least:.1%} is the least", flush=True)
            continue
        print(
            f"{result.share:<8.1%} {result.peak_bytes / 2**20:11.2f} MiB {result.peak_bytes / plain_bytes:10.1%} "
            f"{result.times:14.3f} {result.foreseen:10.3f}   {'equal' if result.equal else 'DIFFERENT'}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
