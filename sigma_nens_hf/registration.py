"""Adds the method ``SIGMA_NORM`` to peft; the only module that touches peft's registries.

``peft.PeftType`` is a closed enumeration, yet every lookup in peft goes through it. It is therefore extended
once, in place. Without this package imported, peft answers an adapter of this kind with
``KeyError: 'SIGMA_NORM'``.
"""

from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import register_peft_method

METHOD_NAME = "SIGMA_NORM"
PARAMETER_PREFIX = "sigma_norm_"


def extend_peft_type() -> PeftType:
    """Return ``PeftType.SIGMA_NORM``, adding it to the enumeration on the first call."""
    if METHOD_NAME in PeftType.__members__:
        return PeftType[METHOD_NAME]
    member = str.__new__(PeftType, METHOD_NAME)
    member._name_ = METHOD_NAME
    member._value_ = METHOD_NAME
    member.__objclass__ = PeftType
    # From Python 3.12 on, members are plain class attributes; the enumeration's own setter refuses new ones.
    type.__setattr__(PeftType, METHOD_NAME, member)
    PeftType._member_map_[METHOD_NAME] = member
    PeftType._value2member_map_[METHOD_NAME] = member
    PeftType._member_names_.append(METHOD_NAME)
    return member


def register(config_cls: type, model_cls: type) -> None:
    """Register the method's configuration and tuner with peft; calling it again changes nothing.

    Args:
        config_cls: The ``PeftConfig`` subclass of the method.
        model_cls: The ``BaseTuner`` subclass of the method.

    Raises:
        RuntimeError: Another package has already registered a method of the same name.
    """
    peft_type = extend_peft_type()
    registered = PEFT_TYPE_TO_CONFIG_MAPPING.get(peft_type)
    if registered is None:
        register_peft_method(
            name=METHOD_NAME.lower(), config_cls=config_cls, model_cls=model_cls, prefix=PARAMETER_PREFIX
        )
    elif registered is not config_cls:
        raise RuntimeError(
            f"peft already has a method {METHOD_NAME}, registered by {registered.__module__}. "
            f"Import either that package or {config_cls.__module__.split('.')[0]}, not both."
        )
