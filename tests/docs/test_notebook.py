"""The notebook runs as it stands, in a kernel, with few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks/quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("VLMRL_NOTEBOOK_SHORT", "1")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # it is kept without outputs
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    # Images made by hand, of the trajectory, and the curve.
    assert sum("image/png" in output.get("data", {}) for output in shown) >= 3
    assert any("background: rgba" in output.get("data", {}).get("text/html", "") for output in shown)
    assert {"notebook", "notebook_squeezed", "notebook_check"} <= {path.name for path in (tmp_path / "runs").iterdir()}
