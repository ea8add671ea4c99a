import pytest

from cs336_systems.report import pictures


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are empty, which saves most of their time. Their hashes are those of what would be in them."""
    from matplotlib.figure import Figure

    write = pictures.write_figure
    monkeypatch.setattr(
        pictures, "write_figure", lambda figure, path, **metadata: write(Figure(figsize=(1, 1)), path, **metadata)
    )
