import json

import branch_points
import comparison_runs
import numpy as np
import pytest
from branch_points import BranchPoint
from datasets import DatasetDict
from test_compare_baselines import sentences


@pytest.fixture
def command_line(tmp_path, checkpoint_folder, monkeypatch):
    splits = DatasetDict(train=sentences(60, 0), test=sentences(21, 60))
    monkeypatch.setattr(comparison_runs, "sst2_like", lambda: splits)
    monkeypatch.setattr(comparison_runs, "has_fast_bf16", lambda: False)
    checkpoint = checkpoint_folder("bert", encoder_only=True)
    return [
        "--model_name_or_path", str(checkpoint), "--offline_assets", "--output_dir", str(tmp_path / "out"),
        "--members", "2", "--branch_layers", "1", "--seeds", "0", "1", "--num_train_epochs", "1",
        "--max_train_samples", "40", "--resamples", "20",
    ]  # fmt: skip


def test_every_branch_point_is_trained_reported_and_resumed(command_line, tmp_path, capsys):
    branch_points.main(command_line)
    out = tmp_path / "out"
    names = ["M2-full", "M2-frozen1", "M2-shared1", "M2-staged1"]
    runs = {name: json.loads((out / f"{name}-seed0-0" / "run.json").read_text()) for name in names}
    assert len(list(out.glob("M*/run.json"))) == 8
    assert len(list((out / "prefixes").iterdir())) == 3  # one for the checkpoint's own, one for each tuned one
    sizes = {name: run["stored_bytes"] for name, run in runs.items()}
    assert sizes["M2-frozen1"] < sizes["M2-shared1"] == sizes["M2-staged1"] < sizes["M2-full"]
    report = (out / "report.md").read_text()
    assert report in capsys.readouterr().out
    for row in ("none: full depth | - | 2.00 | - | 2.00", "frozen | 1 | 1.25 | 1.00 | 1.50", "shared | 1 | 1.50 | -"):
        assert row in report
    (out / "M2-shared1-seed1-0" / "run.json").unlink()  # as a kill leaves it
    before = dict(np.load(out / "M2-shared1-seed1-0" / "logits.npz"))
    branch_points.main([*command_line, "--train_only"])
    again = np.load(out / "M2-shared1-seed1-0" / "logits.npz")
    assert all(np.array_equal(before[name], again[name]) for name in before)
    with pytest.raises(ValueError, match="other settings"):
        branch_points.main([*command_line, "--diversity_weight", "1"])


def test_unknown_prefixes_are_refused(command_line):
    with pytest.raises(ValueError, match="no prefix"):
        branch_points.main([*command_line, "--prefixes", "magic"])


@pytest.mark.parametrize(
    ("point", "costs"),
    [
        (BranchPoint(4), (4, 4, 4)),
        (BranchPoint(4, "frozen", 4), (5 / 3, 4 / 3, 2)),
        (BranchPoint(8, "staged", 4), (3, 8 / 3, 10 / 3)),
        (BranchPoint(4, "shared", 4), (2, 2, 2)),
    ],
)
def test_counted_costs(point, costs):
    assert point.counted_costs(6) == pytest.approx(costs)
