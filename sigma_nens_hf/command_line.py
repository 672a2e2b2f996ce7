"""What the commands of the command line have in common."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
import transformers
import typer
from rich.console import Console
from rich.text import Text


def quiet(is_main_process: bool) -> None:
    """Show no progress of single steps, and of other processes nothing but errors.

    Args:
        is_main_process: Whether this process speaks for all.
    """
    transformers.logging.disable_progress_bar()
    # peft asks for it by its deprecated name.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    if not is_main_process:
        datasets.disable_progress_bars()
        transformers.logging.set_verbosity_error()


def input_columns(image: str | None, text: str | None, second_text: str | None) -> list[str]:
    """Return the columns of the inputs that were named.

    Args:
        image: Column of the image.
        text: Column of the text.
        second_text: Column of a second text.

    Raises:
        ValueError: They contradict each other.
    """
    if second_text and not text:
        raise ValueError(f"With the second text's column, {second_text}, that of the first must be given as well.")
    if image and text:
        raise ValueError(f"The input is either an image or a text, not both {image} and {text}.")
    return [column for column in (image, text, second_text) if column]


@contextmanager
def errors_as_messages(is_main_process: bool) -> Iterator[None]:
    """Show what the user can mend as a message, once, and end with exit code 1.

    Args:
        is_main_process: Whether this process speaks for all.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if is_main_process:
            Console(stderr=True, soft_wrap=True).print(Text(f"Error: {error}", style="red"))
        raise typer.Exit(1) from None
