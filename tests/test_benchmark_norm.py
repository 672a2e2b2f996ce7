import json

import benchmark_norm
import pytest

TINY = ["--num_members", "1", "3", "--batch_size", "2", "--length", "3", "--hidden_size", "8", "--rounds", "2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_figures_are_printed_and_written(kind, dtype, tmp_path, capsys):
    file = tmp_path / "norms.json"
    benchmark_norm.main([*TINY, "--kind", kind, "--dtype", dtype, "--output", str(file)])
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())["measurements"]
    assert [(row["num_members"], row["with_gradients"]) for row in found] == [
        (1, False), (1, True), (3, False), (3, True)
    ]  # fmt: skip
    for row in found:
        assert set(row["ratios"]) == {"package", "loop", "affine"}
        assert min(row["ratios"].values()) > 0
        assert row["plain_ms"] > 0
    assert "package" in printed


def test_way_that_computes_something_else_is_found(monkeypatch):
    monkeypatch.setattr(benchmark_norm, "ways_of", lambda arguments: {"plain": benchmark_norm.plain})
    with pytest.raises(RuntimeError, match="plain differs from the loop"):
        benchmark_norm.main(TINY)
