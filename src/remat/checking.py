"""The command `remat check`: will a model's training step fit, and at what price? Nothing is run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from . import options
from .options import option


def command(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="What returns the model; or FILE.py:FACTORY.")
    ],
    given: Annotated[
        list[str],
        typer.Option(
            "--input",
            metavar="[NAME=]SHAPE[:DTYPE]",
            help="What it is called with, in turn: 8x3x32x32, ids=8x128:int64.",
        ),
    ],
    budget: Annotated[
        int | None, option(options.size, "SIZE", "The memory for a step, beside parameters (90 % of what is free).")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(metavar="NAME", help="Of torch.optim: adamw, sgd.")] = None,
    really: Annotated[bool, typer.Option("--really", help="Make the model in memory, not on the device meta.")] = False,
    json_file: options.JsonFile = None,
) -> int:
    """Whether a training step fits into a budget, what it is made of, and what other budgets would cost.

    Answered on fake tensors: the model need not fit this machine. Ends with 0 if it fits, else with 1.

    remat check train.py:make_model --input 8x1024:int64 --budget 8GiB --optimizer adamw
    """
    from . import targets
    from .check import check

    device = "cpu" if really else "meta"
    args, kwargs = list[Any](), dict[str, Any]()
    for text in given:
        name, _, shape = text.rpartition("=")
        tensor = targets.parse_input(shape).tensor(device)
        if name:
            kwargs[name] = tensor
        else:
            args.append(tensor)
    try:
        model = targets.load(target, device)
    except NotImplementedError as error:  # a value was asked for
        raise typer.TyperException(f"{target}: cannot be made without memory ({error}); give --really") from None
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise typer.TyperException(f"{target}: cannot be made without memory ({error}); give --really") from None
    try:
        found = check(model, *args, budget=budget, optimizer=optimizer, **kwargs)
    except (TypeError, ValueError) as error:
        raise typer.TyperException(f"{target}: {error}") from None
    with options.writing("--json", json_file):
        if json_file is not None:
            options.write(json_file, [json.dumps(found.to_dict(), indent=2), "\n"])
    if json_file != "-":
        print(found)
    return 0 if found.fits else 1
