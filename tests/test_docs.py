"""The Python of the documentation runs as it is written, a page at a time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_its_python(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), namespace)


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == [page.name for page in PAGES]


def test_the_limits_are_those_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    start, end = (readme.index(f"<!-- --8<-- [{edge}:limits] -->") for edge in ("start", "end"))
    assert readme[start:end].count("\n* ") >= 3


def test_the_reference_has_all_that_is_public() -> None:
    import remat

    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    errors = {name for name in remat.__all__ if "remat.errors" in getattr(getattr(remat, name), "__module__", "")}
    for name in set(remat.__all__) - errors - {"__version__"}:
        assert f"heading: remat.{name}," in text, f"docs/api.md lacks remat.{name}: add it there"
