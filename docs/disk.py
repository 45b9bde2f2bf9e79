"""Changes what the theme builds: the site works from the disk and fetches nothing, and long names of the API wrap."""

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leaves out the page for addresses that lead nowhere: only a server shows it, and its links start at `/`."""
    config.theme.static_templates.discard("404.html")
    return config


def on_post_page(output: str, **_: Any) -> str:
    """Keeps the theme's script from asking GitHub for stars and forks, and lets names of the API break after a dot."""
    output = output.replace(' data-md-component="source"', "")
    return re.sub(r'(?<=class="doc doc-object-name )[^<]*', lambda name: name[0].replace(".", ".<wbr>"), output)
