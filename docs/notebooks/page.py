"""Makes a page of each notebook when the documentation is built: its cells and their stored outputs. Runs nothing."""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

LINK = re.compile(r"\]\(([\w./]+)\.ipynb\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page of each notebook, beside the notebook itself, which can be downloaded."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(file.content_string)
        name = Path(file.src_uri)
        files.append(File.generated(config, str(name.with_suffix(".md")), content=page_of(notebook, name.name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links to notebooks, which work on GitHub, into links to their pages."""
    return LINK.sub(r"](\1.md)", markdown)


def page_of(notebook: dict[str, Any], name: str) -> str:
    """Returns a notebook as Markdown, with a link to download it after its title."""
    first, *others = (part for cell in notebook["cells"] for part in _parts(cell))
    # HTML, because links in Markdown go to the page.
    return "\n\n".join([first, f'<p><a href="{name}" download>Download the notebook</a></p>', *others]) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [f"```python\n{source}\n```", *(_output(output, cell["metadata"]) for output in cell["outputs"])]


def _output(output: dict[str, Any], metadata: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![{metadata['alt']}](data:image/png;base64,{data['image/png']})"
    return f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```"
