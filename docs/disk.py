"""Changes what the theme builds so that the site works from the disk, and fetches nothing from the network."""

from typing import Any

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leaves out the page for addresses that lead nowhere: only a server shows it, and its links start at `/`."""
    config.theme.static_templates.discard("404.html")
    return config


def on_post_page(output: str, **_: Any) -> str:
    """Keeps the link to the repository from asking GitHub for stars and forks, which the theme's script does."""
    return output.replace(' data-md-component="source"', "")
