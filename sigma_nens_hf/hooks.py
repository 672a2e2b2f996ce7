"""Taking hooks off modules, of which torch keeps notes in several places and gives handles to those who keep them."""

from torch import nn


def take_off_hooks(module: nn.Module, *kinds: type) -> None:
    """Take the hooks of some classes off a module, those that run before its forward and those that run after it.

    Args:
        module: The module itself; those inside it keep theirs.
        *kinds: The classes.
    """
    notes = (
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, kinds):
                del hooks[key]
                for note in notes:
                    note.pop(key, None)
