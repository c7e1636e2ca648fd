"""What MkDocs needs beyond docs/: pages made of the README, of other folders' pages and of the protos (mkdocs.yml).

Pages link as they do in the repository, so that a code host shows them, too. `on_page_markdown` turns a link to a file
outside docs/ into one to the page made of it, or to a copy of the file on the site.
"""

import ast
import os.path
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "docs"
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmark-methods.md",
    "helm/histospec/README.md": "chart.md",
}
"""Files of the repository, and the pages of the site that show them."""
MODULES = {
    "api/client.md": ("Python client", "histospec.client"),
    "api/rollouts.md": ("SPEC-RL in Python", "histospec.client.rollouts"),
    "api/native.md": ("Engine in Python", "histospec.native"),
}
PROTOS = ("protos/histospec/v1/draft.proto", "protos/histospec/specrl/rollout_cache.proto")
LINK = re.compile(r'(\]\(|\b(?:src|srcset|href)=")([^)\s"]+)')
PICTURE = re.compile(
    r'<picture>\s*<source[^>]*srcset="([^"]+)"[^>]*>\s*<img[^>]*alt="([^"]*)"[^>]*src="([^"]+)"[^>]*>\s*</picture>'
)
"""A picture of the dark and the light scheme; the site switches between them with its own schemes."""
ITEM = re.compile(r"((?:^//.*\n)*)^(service|message|enum) (\w+) \{\n(.*?)^\}", re.M | re.S)
CALL = re.compile(r"((?:^  //.*\n)+)^  (rpc .*;)$", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that have no file in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_moved((ROOT / source).read_text(), source, files, config)))
    for page, (title, module) in MODULES.items():
        options = client_first() if module == "histospec.client" else ""
        files.append(File.generated(config, page, content=f"# {title}\n\n::: {module}\n{options}"))
    files.append(File.generated(config, "api/protocol.md", content=protocol()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page of docs/, with links that hold on the site."""
    if page.file.generated_by is not None:
        return markdown
    return _moved(markdown, f"{FOLDER}/{page.file.src_uri}", files, config)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Removes the `::` that docstrings have before their examples."""
    return re.sub(r"<p>::</p>\n?", "", html).replace("::</p>", ":</p>")


def _moved(text: str, source: str, files: Files, config: MkDocsConfig) -> str:
    """The text of a file of the repository, with links from the place that its page has on the site."""
    here = _place(source)

    def link(found: re.Match[str]) -> str:
        target, mark, anchor = found[2].partition("#")
        if not target or ":" in target:
            return found[0]
        path = os.path.normpath(PurePosixPath(source).parent / target)
        shown = path in PAGES or path.startswith(f"{FOLDER}/") or files.get_file_from_path(path)
        if not shown:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
        return f"{found[1]}{os.path.relpath(_place(path), PurePosixPath(here).parent)}{mark}{anchor}"

    return PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", LINK.sub(link, text))


def _place(path: str) -> str:
    return PAGES.get(path, path.removeprefix(f"{FOLDER}/"))


def client_first() -> str:
    """The options that let the page of the client begin with `DraftClient`: names in the order of the page."""
    (names,) = re.findall(r"^__all__ = (\[.*?^\])", (ROOT / "client" / "__init__.py").read_text(), re.M | re.S)
    public = [name for name in ast.literal_eval(names) if not name.startswith("_")]
    ordered = sorted(public, key=lambda name: name != "DraftClient")
    return "    options:\n      members:\n" + "".join(f"        - {name}\n" for name in ordered)


def protocol() -> str:
    """The page of the wire protocol: each service, call and message of the protos with its comment."""
    text = "# Wire protocol\n\nMade from the comments of the `.proto` files.\n"
    for path in PROTOS:
        package = PurePosixPath(path).parent.name
        head, _, body = (ROOT / path).read_text().partition('syntax = "proto3";')
        text += f"\n## `{path}`\n\n{_said(head)}\n"
        for comment, kind, name, inside in ITEM.findall(body):
            if kind == "service":
                text += f"\n### Service {package}.{name}\n\n{_said(comment)}\n"
                for said, call in CALL.findall(inside):
                    method = call.removeprefix("rpc ").partition("(")[0]
                    text += f"\n#### {method}\n\n```proto\n{call}\n```\n\n{_said(said)}\n"
            else:
                text += f"\n### {name}\n\n{_said(comment)}\n\n```proto\n{kind} {name} {{\n{inside}}}\n```\n"
    return text


def _said(comment: str) -> str:
    """The text of a block of comments."""
    return "\n".join(line.strip().removeprefix("//").strip() for line in comment.strip().split("\n"))
