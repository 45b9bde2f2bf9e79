"""A table that stands between two marks of a Markdown file, and is put there by a program."""

import re
from pathlib import Path


def fill(path: Path, name: str, text: str) -> None:
    """Puts `text` between the two marks called `name`, in place of what was there."""
    check_marks(path, name)
    filled = _between(name).sub(lambda _: f"\n{text}\n\n", path.read_text(encoding="utf-8"))
    path.write_text(filled, encoding="utf-8")


def check_marks(path: Path, name: str) -> None:
    """Ends the program unless the file holds the two marks, each once."""
    content = path.read_text(encoding="utf-8") if path.is_file() else ""
    if len(_between(name).findall(content)) != 1:
        opening, closing = _marks(name)
        raise SystemExit(f"The file must hold the lines {opening} and {closing}, in order and once. Received: {path}.")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- figures: {name} -->", f"<!-- end: {name} -->"


def _between(name: str) -> re.Pattern[str]:
    opening, closing = map(re.escape, _marks(name))
    return re.compile(f"(?<={opening}\n).*?(?={closing})", re.DOTALL)
