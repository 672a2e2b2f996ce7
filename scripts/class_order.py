"""Whether a checkpoint's classifier speaks of a dataset's classes, in the same order: only then may it be copied."""

import re

from transformers import AutoConfig

# Published names of the same classes differ here and there, in one of ImageNet's thousand or another.
ENOUGH = 0.9


def head_init_for(model_id: str, revision: str | None, names: list[str]) -> tuple[str, str | None]:
    """Decide how the members' heads start where the user leaves it open.

    Args:
        model_id: The checkpoint.
        revision: Its revision.
        names: The dataset's class names.

    Returns:
        "copy" or "fresh" if the checkpoint has a classifier for as many classes, whether they are the same or others or
        in another order; "auto" if it does not say, which copies a head of the right size where there is one; and what
        to tell the user about it, if anything.
    """
    config = AutoConfig.from_pretrained(model_id, revision=revision)
    own_names = [config.id2label[index] for index in sorted(config.id2label)]
    has_classifier = any("Classification" in name for name in config.architectures or ())
    if not has_classifier or len(own_names) != len(names):
        return "auto", None
    if all(re.fullmatch(r"LABEL_\d+", name) for name in own_names):
        return "auto", (
            "The checkpoint does not name its classes. Its head is copied: make sure that the dataset's classes are in "
            "the same order, or pass --head_init fresh."
        )
    agreeing = sum(essence(own) == essence(name) for own, name in zip(own_names, names, strict=True))
    if agreeing >= ENOUGH * len(names):
        return "copy", None
    return "fresh", (
        f"Of the checkpoint's {len(names)} classes {agreeing} have the names of the dataset's at the same place "
        f"({own_names[0]!r} and {names[0]!r} are the first): its head is not copied, members get fresh ones."
    )


def essence(name: str) -> str:
    """Return what is left of a class name without its synset, synonyms, case and punctuation.

    Args:
        name: Such as "n01440764 tench" or "tench, Tinca tinca".
    """
    first = re.sub(r"^n\d{8}[\s_]", "", name).split(",")[0]
    return re.sub(r"[\W_]+", " ", first.casefold()).strip()
