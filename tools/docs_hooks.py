"""Hooks of mkdocs: files of the repository that pages link to become pages of the site.

A link such as ``../lrlhf/models/heads.py`` works where the page is read in the repository, but
leads out of the site, which has only the files in ``docs``. So the site gets a page with the text
of each linked file, under ``source/``, and the links lead there. ``CONTRIBUTING.md`` stands beside
the package and is the page ``contributing.md``.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\]\((\.\./[^)#\s]+)(?=[)#])")
CONTRIBUTING = "contributing.md"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".md": "markdown"}


def repository_path(src_uri: str, link: str, config: MkDocsConfig) -> str | None:
    """The path of a link's target from the root of the repository.

    Args:
        src_uri: The page that has the link, from ``docs`` on.
        link: The relative target, such as ``../lrlhf/types.py``.
        config: The settings of mkdocs.

    Returns:
        The path, or None if the target is in ``docs`` or no file: mkdocs then warns about it.
    """
    docs = Path(config.docs_dir)
    target = (docs / src_uri).parent.joinpath(link).resolve()
    if target.is_relative_to(docs) or not target.is_relative_to(docs.parent):
        return None
    return target.relative_to(docs.parent).as_posix() if target.is_file() else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page for contributors and a page for each file that others link to."""
    text = (Path(config.docs_dir).parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files.append(File.generated(config, CONTRIBUTING, content=as_page(text)))
    paths = {
        path
        for page in files.documentation_pages()
        for link in LINK.findall(page.content_string)
        if (path := repository_path(page.src_uri, link, config))
    }
    for path in sorted(paths - {"CONTRIBUTING.md"}):
        text = (Path(config.docs_dir).parent / path).read_text(encoding="utf-8")
        shown = (
            notebook_page(text)
            if path.endswith(".ipynb")
            else f"# {path}\n\n{fenced(text, LANGUAGES[Path(path).suffix])}"
        )
        content = f"---\nsearch: {{exclude: true}}\n---\n\n{shown}"
        files.append(File.generated(config, f"source/{path}.md", content=content))
    return files


def as_page(text: str) -> str:
    """The text of a file beside ``docs``, with the links of a file inside of it."""
    links = re.sub(r"\]\((?![a-z]+:|#)([^)]+)\)", r"](../\1)", text)
    return links.replace("](../docs/", "](")


def fenced(text: str, language: str) -> str:
    """Text as a block of code."""
    fence = "`" * (2 + max(map(len, re.findall("`+", text)), default=1))
    return f"{fence}{language}\n{text}\n{fence}\n"


def notebook_page(text: str) -> str:
    """The cells of a notebook as Markdown, each with what came out; pictures are in the page.

    Links into ``docs`` lead to the pages; of others, which lead to no page, the text stays.
    """
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = source.replace("](../docs/", "](../../")
            parts.append(re.sub(r"\[([^]]+)\]\(\.\./(?!\.\./)[^)]*\)", r"\1", source))
            continue
        parts.append(fenced(source, "python"))
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = "".join(data["image/png"]).replace("\n", "")
                parts.append(f"![output of the cell](data:image/png;base64,{picture})")
            else:
                said = "".join(output.get("text") or data["text/plain"])
                parts.append(fenced(said.strip("\n"), "text"))
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Turns links to files of the repository into links to their pages."""

    def replaced(match: re.Match[str]) -> str:
        path = repository_path(page.file.src_uri, match[1], config)
        if path is None:
            return match[0]
        target = CONTRIBUTING if path == "CONTRIBUTING.md" else f"source/{path}.md"
        folder = posixpath.dirname(page.file.src_uri)
        return f"]({posixpath.relpath(target, folder or '.')}"

    return LINK.sub(replaced, markdown)
