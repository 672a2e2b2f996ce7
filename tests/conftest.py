import os

# Before transformers is imported: no test may reach for the Hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import subprocess
import sys
import textwrap

import pytest
import tiny
import torch
import transformers

# Tiny tensors are slower on many threads, and tests share the machine with others.
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch):
    # Of the scripts' reports, whose intervals are tested elsewhere.
    if "stage_report" in sys.modules:
        monkeypatch.setattr("stage_report.RESAMPLES", 20)


@pytest.fixture(scope="session")
def run_python():
    """Run code in a fresh process with this one's number of threads; its standard output is returned."""

    def run(code: str, *arguments: str) -> str:
        code = f"import torch\ntorch.set_num_threads({torch.get_num_threads()})\n" + textwrap.dedent(code)
        environment = {**os.environ, "PYTHONPATH": os.path.dirname(tiny.__file__)}
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture
def checkpoint_folder(tmp_path, tokenizer):
    """Save a tiny model the way a checkpoint is published: `encoder_only` without its classifier."""

    def save(architecture: str, encoder_only: bool = False, **kwargs):
        folder = tmp_path / f"{architecture}-{'encoder' if encoder_only else 'classifier'}"
        model = tiny.base_model(architecture, **kwargs)
        (tiny.encoder_of(model) if encoder_only else model).save_pretrained(folder)
        if architecture in tiny.IMAGE_ARCHITECTURES:
            size = {"height": tiny.IMAGE_SIZE, "width": tiny.IMAGE_SIZE}
            transformers.ViTImageProcessor(size=size).save_pretrained(folder)
        else:
            tokenizer.save_pretrained(folder)
        return folder

    return save
