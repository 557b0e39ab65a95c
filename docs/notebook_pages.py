"""The notebooks: as pages of the site, which MkDocs makes by `on_files`, and run, by

    python docs/notebook_pages.py

which writes text and pictures into them, and their pictures to docs/images, for pages that show them.
"""

import base64
import contextlib
import io
import json
import linecache
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"
PNG = "image/png"
Cell = dict[str, Any]


def run(path: Path) -> Iterator[tuple[Cell, list[Cell]]]:
    """Run the code cells of a notebook in order; each with its outputs, as nbformat has them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.close("all")  # what was drawn before is of no cell
    namespace = {"__name__": path.stem}
    for number, cell in enumerate(code_cells(json.loads(path.read_text())), 1):
        source, name = "".join(cell["source"]), f"cell {number}"
        linecache.cache[name] = len(source), None, source.splitlines(True), name  # for messages
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, name, "exec"), namespace)
        outputs = []
        if text := printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": text})
        for figure in map(pyplot.figure, pyplot.get_fignums()):
            picture = io.BytesIO()
            figure.savefig(picture, dpi=100, bbox_inches="tight", metadata={"Software": None})
            data = {PNG: base64.b64encode(picture.getvalue()).decode()}
            outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
        pyplot.close("all")
        yield cell, outputs


def code_cells(notebook: Cell) -> list[Cell]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(outputs: list[Cell]) -> str:
    return "".join("".join(output.get("text", "")) for output in outputs)


def pictures_of(outputs: list[Cell]) -> list[str]:
    """The pictures, in base64."""
    return [output["data"][PNG] for output in outputs if PNG in output.get("data", {})]


def markdown(notebook: Cell) -> str:
    """The page of a notebook. A cell that draws has the picture's description in its metadata."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        if text := text_of(cell["outputs"]):
            parts.append(f"```text\n{text.rstrip()}\n```")
        for picture in pictures_of(cell["outputs"]):
            parts.append(f"![{cell['metadata']['alt']}](data:{PNG};base64,{picture})")
    return "\n\n".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs: each notebook is a page, and a file to download."""
    from mkdocs.structure.files import File

    class Page(File):
        def is_documentation_page(self) -> bool:
            return True

    for path in sorted(FOLDER.glob("*.ipynb")):
        uri, copy = f"{FOLDER.name}/{path.name}", f"download/{path.name}"
        text = markdown(json.loads(path.read_text()))
        text += f"\n\nThe notebook as a file: [{path.name}]({copy})."
        files.remove(files.get_file_from_path(uri))
        files.append(Page.generated(config, uri, content=text))
        file = path.read_bytes()
        files.append(File.generated(config, f"{FOLDER.name}/{copy}", content=file))
    return files


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"  # of tables
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        for number, (cell, (_, outputs)) in enumerate(
            zip(code_cells(notebook), run(path), strict=True), 1
        ):
            cell |= {"execution_count": number, "outputs": outputs}
            for picture in pictures_of(outputs):
                target = FOLDER.parent / "images" / f"{cell['metadata']['picture']}.png"
                target.write_bytes(base64.b64decode(picture))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
