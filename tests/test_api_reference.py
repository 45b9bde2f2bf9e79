"""The API reference has every public name of the library, and no private one."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
DIRECTIVE = re.compile(r"^::: (\S+)", re.MULTILINE)


def modules() -> dict[str, ast.Module]:
    """Returns the source of every module. None is imported, as frameworks may be missing."""
    paths = {path: path.relative_to(SOURCES).with_suffix("").parts for path in SOURCES.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): ast.parse(path.read_text()) for path, parts in paths.items()}


def origin(path: str, sources: dict[str, ast.Module]) -> str:
    """Returns where the object is defined, as one object may be imported from several modules."""
    module, _, name = path.rpartition(".")
    for node in sources[module].body:
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            imported = f"{node.module}.{name}"
            return path if imported == path else origin(imported, sources)  # equal for a module of a package
    return path


def public(sources: dict[str, ast.Module]) -> set[str]:
    """Returns what all modules list in their `__all__`, but for modules, which list names of their own."""
    listed: set[str] = set()
    for module, source in sources.items():
        for node in source.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                listed |= {origin(f"{module}.{name}", sources) for name in ast.literal_eval(node.value)}
    return listed - set(sources)


def documented() -> list[str]:
    """Returns the path of every object on the pages of the reference."""
    pages = (ROOT / "docs" / "reference" / "api").glob("*.md")
    return [path for page in sorted(pages) for path in DIRECTIVE.findall(page.read_text())]


def test_every_public_name_is_in_the_reference() -> None:
    sources = modules()
    listed = public(sources)
    assert len(listed) > 60
    assert sorted(listed - {origin(path, sources) for path in documented()}) == []


def test_nothing_private_is_in_the_reference() -> None:
    sources = modules()
    listed = public(sources)
    assert [path for path in documented() if origin(path, sources) not in listed] == []


def test_no_name_is_in_the_reference_twice() -> None:
    paths = documented()
    assert len(set(paths)) == len(paths)
