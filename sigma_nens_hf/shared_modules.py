"""Which modules are trained as one copy that the members share."""

from peft.utils import AuxiliaryTrainingWrapper
from transformers import PreTrainedModel

from .config import SigmaNormConfig
from .heads import HeadPlan
from .layer import MemberLayer


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
        ValueError: A named module does not exist, or overlaps with one that every member has of its own or with one
            of another adapter on the same model.
    """
    # Modules under the wrapper of another adapter go by the names that they have without it.
    every_name = {_plain(name) for name, _ in model.named_modules()}
    resolved = [] if config.shared_modules_are_exact else list(plan.shared)
    for wanted in config.shared_modules:
        found = [name for name in every_name if name == wanted or name.endswith(f".{wanted}")]
        if not found:
            raise ValueError(f"modules_to_save names {wanted!r}, but {type(model).__name__} has no such module.")
        resolved += sorted(found)
    for name in resolved:
        for owned in (*norm_names, *plan.member):
            # The end of a name is what peft goes by.
            if _overlap(name, owned) or owned.endswith(name):
                raise ValueError(
                    f"modules_to_save names {name!r}, but every member has its own {owned!r}. Leave that out with "
                    "`exclude_modules` or `member_heads`, or do not share the module."
                )
    # A module inside another shared one is shared with it.
    shared = [name for name in dict.fromkeys(resolved) if not any(name.startswith(f"{outer}.") for outer in resolved)]
    _check_other_adapters(model, shared, norm_names)
    return shared


def _check_other_adapters(model: PreTrainedModel, shared: list[str], norm_names: list[str]) -> None:
    """Refuse modules that lie in or around those of another adapter on the same model.

    Raises:
        ValueError: There is one.
    """
    wrapped = [name for name, module in model.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    layers = [name for name, module in model.named_modules() if isinstance(module, MemberLayer)]
    pairs = [(name, other) for name in shared for other in (*wrapped, *layers) if name != other]
    pairs += [(name, other) for name in norm_names for other in wrapped]
    for name, other in pairs:
        if _overlap(name, _plain(other)):
            raise ValueError(
                f"{name!r} overlaps with {_plain(other)!r}, which another adapter on this model has in another form. "
                "Load them over models of their own."
            )


def _plain(name: str) -> str:
    return name.replace(".original_module", "").replace(".base_layer", "")


def _overlap(name: str, other: str) -> bool:
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")
