"""Links between the files of the repository lead somewhere. `make docs` checks those between pages of the site."""

import re
import tomllib
import unicodedata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OURS = re.compile(
    r"https://(?:github\.com/gradscale/gradscale/(?:blob|tree|raw)|raw\.githubusercontent\.com/gradscale/gradscale)/main/?([^\s)\"'>#`\\]*)(#[\w-]+)?"
)
LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(FENCED.pattern + r"|`[^`\n]+`", re.MULTILINE | re.DOTALL)
READ_ON_GITHUB = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
WITH_ADDRESSES = (
    *(ROOT / name for name in READ_ON_GITHUB),
    ROOT / "pyproject.toml",
    ROOT / "mkdocs.yml",
    ROOT / "CITATION.cff",
    *sorted((ROOT / ".github").rglob("*.*")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "src").rglob("*.py")),
)


def anchors(page: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    made: dict[str, int] = {}
    found = set[str]()
    for heading in re.findall(
        r"^#+ (.*?)\s*$", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    ):
        text = unicodedata.normalize("NFC", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{slug}-{made[slug]}" if slug in made else slug)
        made[slug] = made.get(slug, 0) + 1
    return found


def fault(target: Path, anchor: str) -> str | None:
    """Returns what is wrong with a link to a file, or to a heading in it; None if nothing is."""
    if not target.exists():
        return f"no file {target.relative_to(ROOT) if target.is_relative_to(ROOT) else target}"
    if anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
        return f"no heading #{anchor} in {target.relative_to(ROOT)}"
    return None


def relative_links(page: str) -> list[str]:
    """Returns the links of a page that have no scheme."""
    return [link for link in LINK.findall(CODE.sub("", page)) if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("name", READ_ON_GITHUB)
def test_relative_links_lead_to_files_and_headings(name: str) -> None:
    page = ROOT / name
    links = [link.partition("#") for link in relative_links(page.read_text())]
    faults = [fault((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in links]
    assert [each for each in faults if each] == []


def test_addresses_of_our_repository_lead_to_files() -> None:
    found = [(source, match) for source in WITH_ADDRESSES for match in OURS.finditer(source.read_text())]
    faults = [(source.name, fault(ROOT / match[1], (match[2] or "#")[1:])) for source, match in found]
    assert found
    assert [each for each in faults if each[1]] == []


def test_readme_and_the_site_link_to_the_repository_that_the_package_names() -> None:
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
    assert f"]({address})" in (ROOT / "README.md").read_text()
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["repo_url"] == address


def test_the_check_can_fail() -> None:
    assert relative_links("[a](docs/a.md#b) `[c](d.md)` [e](https://f.org/g.md) ![h](i.png)") == [
        "docs/a.md#b",
        "i.png",
    ]
    assert fault(ROOT / "docs/no_such_page.md", "") == "no file docs/no_such_page.md"
    assert fault(ROOT / "README.md", "no-such-heading") == "no heading #no-such-heading in README.md"
    assert anchors("# A `b` & c\n## Two\n## Two\n```\n# d\n```") == {"a-b--c", "two", "two-1"}
