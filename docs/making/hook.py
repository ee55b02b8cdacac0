"""What mkdocs does beside reading `docs/`: pages that are made, and pages that live elsewhere in the tree."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from reference import command_page, config_page  # noqa: E402

ELSEWHERE = {
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
    "recipes.md": "recipes/README.md",
}
"""Pages of the site, and the files that they are."""


def on_files(files: Files, config: Any) -> Files:
    made = {"reference/config.md": config_page(), "reference/commands.md": command_page()}
    made |= {page: _moved((ROOT / file).read_text("utf-8")) for page, file in ELSEWHERE.items()}
    for notebook in sorted((ROOT / "docs/tutorials").glob("*.ipynb")):
        made[f"tutorials/{notebook.stem}.md"] = notebook_page(notebook)
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that would ask anything of another host when it is opened."""
    asked = re.findall(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^"]+', output)
    if asked:
        raise PluginError(f"{page.file.src_uri} asks the network: {asked}")
    return output


def notebook_page(notebook: Path) -> str:
    """A notebook's cells as Markdown, with a link to the notebook itself."""
    parts = []
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    parts.insert(1, f"[This page as a notebook]({notebook.name})")
    return "\n\n".join(parts) + "\n"


def _moved(text: str) -> str:
    """Links as they are from the site's root."""
    text = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
    return re.sub(r"\]\(CONTRIBUTING\.md\)", "](contributing.md)", text)
