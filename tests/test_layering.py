"""Imports go strictly downward: a module uses its own layer and those below, and nothing in a circle.

The layers are those of CONTRIBUTING.md. A new module needs a place in `LAYERS`.
"""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import remat

PACKAGE = Path(remat.__file__).parent
LAYERS = {
    "L0": {"errors", "sizes"},
    "L1": {"chains", "schedules"},
    "L2": {"curves", "page", "planners", "simulator", "report", "plans", "tradeoff"},
    "L3": {
        "accumulators",
        "aliases",
        "ambient",
        "apart",
        "bindings",
        "blocks",
        "boundary_nodes",
        "budgets",
        "captures",
        "casts",
        "collectives",
        "graph",
        "estimate",
        "gauges",
        "inputs",
        "interpreter",
        "kept",
        "loops",
        "meter",
        "missed",
        "mutable",
        "needs",
        "nodes",
        "paces",
        "profiler",
        "ranges",
        "recent",
        "recorded",
        "selective",
        "silence",
        "standins",
        "stages",
        "streams",
        "sums",
        "sweeps",
        "traced",
        "trees",
    },
    "L4": {
        "arrivals",
        "calls",
        "chain",
        "check",
        "chunking",
        "ends",
        "explain",
        "fakes",
        "compiling",
        "discovery",
        "fit",
        "fitting",
        "knowledge",
        "trials",
        "layered",
        "paper",
        "profiling",
        "recurrent",
        "scan",
        "sequential",
    },
    "L5": {
        "checking",
        "cli",
        "deep",
        "demo",
        "figures",
        "integrations",
        "measuring",
        "memory",
        "networks",
        "options",
        "problems",
        "reporting",
        "targets",
    },
}
WITHOUT_TORCH = LAYERS["L0"] | LAYERS["L1"] | LAYERS["L2"] | {"checking", "cli", "options", "problems", "reporting"}
# Siblings that must not share a defect: the judge knows no planner, and no planner asks the judge.
STRANGERS = [("simulator", "planners"), ("planners", "simulator"), ("planners", "plans"), ("planners", "report")]


def layer(module: str) -> int:
    found = [number for number, modules in enumerate(LAYERS.values()) if module in modules]
    assert found, f"remat.{module} has no place in LAYERS: give it one"
    return found[0]


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Everything a file imports, wherever in it, by its first name; modules of ours with a leading dot."""
    depth = len(path.relative_to(PACKAGE).parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {"." + name.split(".")[0] for name in names if name != "__version__"}
    assert "remat" not in found, f"{path} imports remat by its full name: write a relative import"
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path) -> None:
    module = module_of(path)
    for name in sorted(imports(path)):
        if name.startswith("."):
            other = name[1:]
            assert layer(other) <= layer(module), f"{module} imports {other} from a layer above its own"
            assert (module, other) not in STRANGERS, f"{module} must not know {other}"
        elif module in WITHOUT_TORCH:
            assert name not in {"torch", "psutil"}, f"{module} must work without {name}"


def test_nothing_goes_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in sources():
        module = module_of(path)
        used = {name[1:] for name in imports(path) if name.startswith(".")}
        graph.setdefault(module, set()).update(used - {module})
    assert set(TopologicalSorter(graph).static_order()) == set(graph)  # raises CycleError, which names the circle
