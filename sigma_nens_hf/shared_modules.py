"""Which modules are trained as one copy that the members share."""

from transformers import PreTrainedModel

from .config import SigmaNormConfig
from .heads import HeadPlan


def resolve_shared_modules(
    model: PreTrainedModel, config: SigmaNormConfig, plan: HeadPlan, norm_names: list[str]
) -> list[str]:
    """Return the full names of the modules that are trained as one copy shared by the members.

    Args:
        model: The base model.
        config: The adapter's config.
        plan: The plan of the model's head, which adds what is trained of it as one copy.
        norm_names: Names of the norms that carry members.

    Raises:
        ValueError: A named module does not exist, or overlaps with one that every member has of its own.
    """
    every_name = [name for name, _ in model.named_modules()]
    resolved = [] if config.shared_modules_are_exact else list(plan.shared)
    for wanted in config.shared_modules:
        found = [name for name in every_name if name == wanted or name.endswith(f".{wanted}")]
        if not found:
            raise ValueError(f"modules_to_save names {wanted!r}, but {type(model).__name__} has no such module.")
        resolved += found
    for name in resolved:
        for owned in (*norm_names, *plan.member):
            # The end of a name is what peft goes by.
            if f"{owned}.".startswith(f"{name}.") or f"{name}.".startswith(f"{owned}.") or owned.endswith(name):
                raise ValueError(
                    f"modules_to_save names {name!r}, but every member has its own {owned!r}. Leave that out with "
                    "`exclude_modules` or `member_heads`, or do not share the module."
                )
    # A module inside another shared one is shared with it.
    return [name for name in dict.fromkeys(resolved) if not any(name.startswith(f"{outer}.") for outer in resolved)]
