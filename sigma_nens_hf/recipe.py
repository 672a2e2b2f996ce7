"""What an adapter's config says about how it was trained."""

from typing import Any

from .training_args import SigmaNEnsTrainingArguments


def training_recipe(args: SigmaNEnsTrainingArguments, temperature: float | None, train_dataset: Any) -> dict[str, Any]:
    """Return the recipe of a training as plain data.

    Args:
        args: The training arguments.
        temperature: The regulariser's temperature, None where there is a single member and so no regulariser.
        train_dataset: The training data.
    """
    return {
        "diversity_weight": args.diversity_weight,
        "diversity_temperature": temperature,
        "members_per_feature": args.members_per_feature,
        "diversity_reduction": args.diversity_reduction,
        "diversity_layers": args.diversity_layers,
        "learning_rate": args.learning_rate,
        "scaler_learning_rate": args.scaler_learning_rate,
        "scale_learning_rate": args.scale_learning_rate,
        "modules_to_save_learning_rate": args.modules_to_save_learning_rate,
        "num_train_epochs": args.num_train_epochs,
        "max_steps": args.max_steps,
        "prefix_epochs": args.prefix_epochs,
        "prefix_dropout": args.prefix_dropout,
        "train_batch_size": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "train_examples": len(train_dataset) if hasattr(train_dataset, "__len__") else None,
        "dataset": getattr(getattr(train_dataset, "info", None), "dataset_name", None),
        "seed": args.seed,
    }
